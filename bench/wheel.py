"""What users install: the wheel of this tree, tried in an environment of its own.

`make wheel` builds it into `dist/` and installs it into a fresh environment, which finds the other
packages, torch among them, in the one that runs this. There, in an empty folder, go the commands of
a newcomer: install, verdict, picture; with the seconds that each of them took.
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
import zipfile
from pathlib import Path

from bench.compat import build_wheel
from bench.results import ROOT

SCRIPT = ROOT / "bench" / "compat_jobs" / "train.py"
_OF_A_MACHINE = {".pyc", ".so"}
_SECONDS = 300


def left_out(wheel: Path) -> list[str]:
    """Files of the package that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    wanted = [
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "memplan").rglob("*")
        if path.is_file() and path.suffix not in _OF_A_MACHINE
    ]
    return sorted(set(wanted) - packed)


def install(wheel: Path, folder: Path) -> Path:
    """A fresh environment with the wheel; its folder of commands."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q")
    _run(*pip, "--disable-pip-version-check", "--no-index", "--no-deps", str(wheel))
    packages = next(folder.glob("lib/python3*/site-packages"))
    # Folders of a .pth file are searched last, and .pth files in them, such as that of an editable
    # memplan, are not read.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python.parent


def try_it(commands: Path, folder: Path) -> dict[str, float]:
    """Seconds of each step of a newcomer. Raises SystemExit for what does not work."""
    seconds = {}

    def step(name: str, *words: str) -> str:
        began = time.perf_counter()
        said = _run(str(commands / words[0]), *words[1:], cwd=folder)
        seconds[name] = time.perf_counter() - began
        return said

    where = step("import", "python", "-c", "import memplan; print(memplan.__file__)")
    if not Path(where.strip()).is_relative_to(commands.parent):
        raise SystemExit(f"memplan comes from {where.strip()}, not from its wheel")
    library = "memplan.runtime.planned.library"
    code = f"import ctypes, {library} as library; ctypes.CDLL(str(library.library_path()))"
    step("planned allocator", "python", "-c", code)
    found = json.loads(step("self-test", "memplan", "env", "--json"))
    if not (found["native"] and found["capture_ok"]):
        raise SystemExit(f"the wheel does not work: {found['capture_detail']}")
    words = ("--gpu", "24GiB", "-o", "job.trace", "train.py", "decoder")
    print(step("verdict", "memplan", "estimate", *words).splitlines()[0])
    step("picture", "memplan", "report", "-o", "report.html", "job.trace")
    return seconds


def _run(*command: str, cwd: Path = ROOT) -> str:
    mine = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=mine, capture_output=True, text=True, timeout=_SECONDS
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> int:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    began = time.perf_counter()
    wheel = build_wheel(dist)
    built = time.perf_counter()
    if missing := left_out(wheel):
        raise SystemExit(f"not in the wheel: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as name:
        commands = install(wheel, Path(name, "venv"))
        installed = time.perf_counter()
        folder = Path(name, "work")
        folder.mkdir()
        shutil.copy(SCRIPT, folder)
        seconds = try_it(commands, folder)
    seconds = {"build": built - began, "install": installed - built, **seconds}
    print(f"{wheel.relative_to(ROOT)} works; seconds:", end=" ")
    print(", ".join(f"{name} {took:.1f}" for name, took in seconds.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
