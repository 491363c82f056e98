"""A training script run where it could not touch anything if it tried, and where it could.

Once on a read-only mount of everything but the temporary directory, with no network at all; once on
a tree that can be written, whose every byte, mode and time is compared before and after.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.capturing import sandbox as package

SOURCE = str(Path(package.__file__).parents[3])

TRAIN = """
import csv, json, logging, os, shutil, signal, socket, sqlite3, struct, subprocess, sys, tempfile
import time, urllib.request
from pathlib import Path
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

here = Path(__file__).parent
output = here / "outputs"
output.mkdir(exist_ok=True)
os.makedirs(os.path.expanduser("~/.cache/trainer"), exist_ok=True)
logging.basicConfig(filename=output / "train.log", level=logging.INFO)
database = sqlite3.connect(here / "runs.db")
database.execute("create table if not exists runs (name text, loss real)")

for address in (("192.0.2.1", 443), ("api.wandb.ai", 443), ("huggingface.co", 443)):
    try:
        socket.create_connection(address, timeout=300)
    except OSError as problem:
        logging.warning("offline: %s", problem)
    else:
        sys.exit(f"reached {address}")

with FakeTensorMode():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with open(output / "metrics.csv", "w", newline="") as metrics, \\
            open(output / "events.out.tfevents.1.host", "wb") as events:
        table = csv.writer(metrics)
        for step in range(1, 6):
            loss = model(torch.empty(8, 64)).mean()
            loss.backward()
            optimizer.step()
            table.writerow([step, time.time()])
            record = json.dumps({"step": step}).encode()
            events.write(struct.pack("<Q", len(record)) + record)
            database.execute("insert into runs values (?, ?)", (f"step {step}", 0.5))
            folder = output / f"tmp-checkpoint-{step}"
            folder.mkdir()
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            (folder / "trainer_state.json").write_text(json.dumps({"step": step}))
            os.rename(folder, output / f"checkpoint-{step}")
            kept = sorted(output.glob("checkpoint-*"), key=os.path.getmtime)
            for old in kept[:-2]:
                shutil.rmtree(old)
    state = torch.load(output / "checkpoint-5" / "optimizer.pt")
    optimizer.load_state_dict(state)
    model.load_state_dict(torch.load(output / "checkpoint-4" / "pytorch_model.bin"))

database.commit()
assert database.execute("select count(*) from runs").fetchone() == (5,)
assert sorted(p.name for p in output.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
assert (output / "metrics.csv").read_text().count("\\n") == 5
assert (output / "events.out.tfevents.1.host").stat().st_size > 40
with open(here / "history.jsonl", "a") as history:
    history.write("{}\\n")
assert (here / "history.jsonl").read_text() == '{"old": true}\\n{}\\n'
os.remove(here / "stale.txt")
os.symlink(output / "checkpoint-5", here / "latest")
assert json.loads((here / "latest" / "trainer_state.json").read_text()) == {"step": 5}
Path(os.path.expanduser("~/.cache/trainer/index.json")).write_text("{}")
Path("/tmp/trainer-scratch-file").write_text("x")
subprocess.run(["uname", "-a"], check=True, stdout=subprocess.DEVNULL)
os.chdir(output)
os.environ["CHANGED"] = "1"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path.insert(0, str(output))
print("trained")
"""

DRIVER = """
import os, runpy, signal, sys
script = sys.argv[1]
import torch, torch._subclasses.fake_tensor
from memplan.capturing.sandbox import Sandbox
before = (os.getcwd(), dict(os.environ), list(sys.path), signal.getsignal(signal.SIGTERM))
with Sandbox() as box:
    runpy.run_path(script, run_name="__main__")
after = (os.getcwd(), dict(os.environ), list(sys.path), signal.getsignal(signal.SIGTERM))
assert after == before, (before, after)
assert not box.scratch.exists()
print(*box.refused)
"""

READ_ONLY = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount -o remount,ro,bind /
for place in "$@"; do
    mount --bind "$place" "$place"
    mount -o remount,ro,bind "$place"
done
if touch "$1/probe" 2>/dev/null; then echo "still writable"; exit 9; fi
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text(TRAIN)
    (tmp_path / "project/history.jsonl").write_text('{"old": true}\n')
    (tmp_path / "project/stale.txt").write_text("stale")
    return tmp_path


def environment(project: Path) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("TMPDIR", "PYTHONDONTWRITEBYTECODE")}
    return keep | {"HOME": str(project / "home"), "PYTHONPATH": SOURCE}


def command(project: Path) -> list[str]:
    return [sys.executable, "-c", DRIVER, str(project / "project/train.py")]


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Kind, mode, owner, times and contents of everything below `root`, and of `root`."""
    seen: dict[str, tuple[object, ...]] = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        times = (status.st_mtime_ns, status.st_ctime_ns)
        seen[str(path)] = (status.st_mode, status.st_uid, status.st_gid, *times, content)
    return seen


def test_a_tree_that_could_be_written_is_not(project: Path) -> None:
    before = snapshot(project)
    result = subprocess.run(
        command(project),
        env=environment(project),
        cwd=project / "project",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "trained",
        "192.0.2.1:443 api.wandb.ai:443 huggingface.co:443",
    ]
    assert snapshot(project) == before
    assert not Path("/tmp/trainer-scratch-file").exists()


def isolated(script: str, places: list[str]) -> list[str]:
    return ["unshare", "-rmn", "sh", "-c", READ_ONLY + script, "sh", *places]


def skip_unless_permitted(places: list[str]) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare command here")
    tried = subprocess.run(isolated("", places), capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"namespaces or mounts are not permitted here: {tried.stderr.strip()}")


def test_on_a_read_only_mount_without_a_network(project: Path) -> None:
    """Everything is read-only, `/tmp` and the home directory too; only `/dev/shm` is not."""
    places = [str(project)] + [p for p in ("/tmp", "/var/tmp") if Path(p).is_mount()]
    skip_unless_permitted(places)
    before = snapshot(project)
    variables = {
        "PYTHON": sys.executable,
        "DRIVER": DRIVER,
        "TRAIN": str(project / "project/train.py"),
    }
    result = subprocess.run(
        isolated('exec "$PYTHON" -c "$DRIVER" "$TRAIN"', places),
        env=environment(project) | variables,
        cwd=project / "project",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[0] == "trained"
    assert snapshot(project) == before
