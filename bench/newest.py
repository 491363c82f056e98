"""What users get who install PyTorch today: the newest release that pip takes.

`make newest` keeps it, with the torchvision for it, in a folder of the user's cache; the rest comes
from the environment that runs this, memplan as it is in the tree. It runs what the support matrix
runs (`bench.compat`), and estimates the examples. A release that is there already is not fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import compat
from bench.results import ROOT

EXAMPLES = {
    "gpt2": (),
    "resnet50": (),
    "hf_trainer": (),
    "lora": (),
    "moe": (),
    "llama3_8b": (),
    "llama3_70b_fsdp": ("--world-size", "64", "--rank", "0"),
}
"""With memplan's own options."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan"


def newest() -> compat.Build:
    """What pip takes today, by the machine's own constraints; the one that is kept, where the index
    does not answer."""
    asked = ("install", "--dry-run", "--ignore-installed", "--no-deps", "-q", "--report", "-")
    done = compat.run(sys.executable, "-m", "pip", *asked, "torch")
    if done.returncode == 0:
        version = json.loads(done.stdout)["install"][0]["metadata"]["version"]
        return compat.Build(version, cuda="+" not in version)
    kept = [path.parent.name for path in cache().glob("torch-*/complete")]
    if not kept:
        raise SystemExit(f"the index does not answer: {done.stderr.strip()[-300:]}")
    version = kept[0].removeprefix("torch-").partition("-python")[0]
    print(f"the index does not answer: torch {version} as it is kept", flush=True)
    return compat.Build(version, cuda="+" not in version)


def environment(build: compat.Build) -> Path:
    """The Python of one with the release, installed where it is not there or was interrupted."""
    folder = cache() / f"torch-{build.version}-python{sys.version_info[0]}.{sys.version_info[1]}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    print(f"installing torch {build.version} into {folder}: gigabytes, some minutes", flush=True)
    for old in cache().glob("torch-*"):
        shutil.rmtree(old)
    subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
    pip = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check")
    subprocess.run((*pip, f"torch=={build.version}", "torchvision"), check=True)
    complete.touch()
    return python


def borrow(folder: Path) -> None:
    """Make Python find, behind its own packages, those of this environment."""
    lines = [f"site.addsitedir({place!r})" for place in site.getsitepackages()]
    (folder / "sitecustomize.py").write_text("\n".join(["import site", *lines]) + "\n")
    os.environ["PYTHONPATH"] = str(folder)


def example(python: Path, name: str, options: tuple[str, ...]) -> str:
    """What is wrong with an example's estimate, or nothing."""
    return compat.captured(python, *options, f"examples/{name}/train.py")


def main() -> int:
    build = newest()
    python = environment(build)
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        borrow(Path(folder))
        with ThreadPoolExecutor(2) as pool:
            checked = pool.submit(compat.check, python, build)
            said = pool.map(lambda item: example(python, *item), EXAMPLES.items())
            problems = dict(zip(EXAMPLES, said, strict=True))
        row = checked.result()
        problems["matrix"] = row["detail"] if row["result"] != "works" else ""
        problems = {name: problem for name, problem in problems.items() if problem}
    for name, problem in problems.items():
        print(f"torch {row['torch']}: {name}: {problem}")
    seconds = time.perf_counter() - start
    print(f"torch {row['torch']}: {len(problems)} problems, {seconds:.0f} s in {ROOT}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
