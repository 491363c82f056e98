"""Programs that a script starts, where the kernel can hold them and where it cannot."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from memplan.capturing.sandbox import Sandbox, confine
from memplan.capturing.sandbox.children import is_worker, only_looks
from memplan.types.errors import CaptureError

confined = pytest.mark.skipif(
    not confine.can_confine_commands(), reason="this kernel has no Landlock"
)
SOURCE = str(Path(confine.__file__).parents[3])


@pytest.fixture
def no_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "landlock_version", lambda: 0)


def shell(command: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload]
        command, shell=True, capture_output=True, text=True, **kwargs
    )


@confined
def test_a_program_can_read_and_not_write(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("content")
    before = (tmp_path / "data").stat()
    with Sandbox():
        assert shell(f"cat {tmp_path}/data").stdout == "content"
        for command in ("echo x > {0}/new", "echo x >> {0}/data", "rm {0}/data", "mkdir {0}/d"):
            assert shell(command.format(tmp_path)).returncode != 0
        assert shell(f"mv {tmp_path}/data {tmp_path}/other").returncode != 0
        assert shell(f"ln -s data {tmp_path}/link").returncode != 0
        assert shell("echo kept > $TMPDIR/x && cat $TMPDIR/x").stdout == "kept\n"
        assert shell("echo nothing > /dev/null").returncode == 0
        assert os.system(f"truncate -s 0 {tmp_path}/data") != 0
    assert os.listdir(tmp_path) == ["data"]
    assert (tmp_path / "data").stat().st_mtime_ns == before.st_mtime_ns


@confined
def test_changes_of_mode_and_time_are_only_pretended(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("content")
    before = (tmp_path / "data").stat()
    with Sandbox():
        assert shell(f"chmod 600 {tmp_path}/data").returncode == 0
        assert shell(f"touch -c -d 2001-01-01 {tmp_path}/data").returncode == 0
    after = (tmp_path / "data").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@confined
def test_a_program_has_no_network() -> None:
    code = "import socket; socket.socket(socket.AF_INET)"
    with Sandbox():
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "unreachable" in result.stderr


@confined
def test_every_way_of_starting_one_is_held(tmp_path: Path) -> None:
    target = tmp_path / "new"
    command = ["/bin/sh", "-c", f"echo x > {target}"]
    with Sandbox():
        assert os.system(command[2]) != 0
        os.popen(command[2]).close()
        os.waitpid(os.posix_spawn(command[0], command, os.environ), 0)
        os.spawnv(os.P_WAIT, command[0], command)
        pid = os.fork()
        if pid == 0:
            os.execv(command[0], command)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    assert not target.exists()


@confined
def test_a_program_starts_in_a_directory_of_the_overlay(tmp_path: Path) -> None:
    with Sandbox():
        (tmp_path / "out").mkdir()
        (tmp_path / "out/f").write_text("in the overlay")
        assert shell("cat f; echo more > g", cwd=tmp_path / "out").stdout == "in the overlay"
        assert (tmp_path / "out/g").read_text() == "more\n"
    assert os.listdir(tmp_path) == []


@confined
def test_programs_that_still_run_are_ended() -> None:
    with Sandbox():
        forgotten = subprocess.Popen(["sleep", "600"])
        done = subprocess.Popen(["true"])
        assert done.wait() == 0
        spawned = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
        assert forgotten.poll() is None
    for pid in (forgotten.pid, spawned):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_exit_codes_of_system_are_as_usual() -> None:
    with Sandbox():
        assert os.waitstatus_to_exitcode(os.system("true")) == 0


def test_without_landlock_only_known_programs_run(tmp_path: Path, no_landlock: None) -> None:
    with Sandbox() as box:
        assert subprocess.check_output(["uname"], text=True) == "Linux\n"
        with pytest.raises(PermissionError):
            subprocess.run(["touch", str(tmp_path / "x")])
        with pytest.raises(PermissionError):
            os.system(f"echo x > {tmp_path}/x")
        assert any("touch" in note for note in box.notes)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "harmless"),
    [
        (["git", "rev-parse", "HEAD"], True),
        (["git", "-C", "/x", "log", "-1"], True),
        (["git", "log", "--output=/tmp/x"], False),
        (["git", "commit"], False),
        (["git"], False),
        (["/usr/bin/nvidia-smi", "-L"], True),
        (["/bin/sh", "-c", "nproc --all"], True),
        (["/bin/sh", "-c", "nproc > x"], False),
        (["/bin/sh", "-c", "echo $(touch x)"], False),
        (["/bin/sh", "-c", "nproc", "x"], False),
        (["env"], True),
        (["env", "touch", "x"], False),
        (["date", "-s", "0"], False),
        (["hostname", "other"], False),
        (["rm", "-r", "/"], False),
        ([], False),
    ],
)
def test_which_programs_only_look(command: Sequence[str], harmless: bool) -> None:
    assert only_looks(command) is harmless


def test_workers_are_known() -> None:
    spawned = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"
    assert is_worker([sys.executable, "-c", spawned])
    assert not is_worker([sys.executable, "train.py"])


def test_the_captured_process_is_not_replaced() -> None:
    with Sandbox() as box:
        with pytest.raises(PermissionError):
            os.execv("/bin/true", ["/bin/true"])
        assert any("/bin/true" in note for note in box.notes)


def write_in_worker(path: str) -> None:
    Path(path).write_text("from a fresh worker")


def test_a_spawned_worker_joins_the_sandbox(tmp_path: Path) -> None:
    with Sandbox():
        worker = multiprocessing.get_context("spawn").Process(
            target=write_in_worker, args=(str(tmp_path / "x"),)
        )
        worker.start()
        worker.join(300)
        assert worker.exitcode == 0
        assert (tmp_path / "x").read_text() == "from a fresh worker"
    assert os.listdir(tmp_path) == []


LOCKED = """
import os, sys
from memplan.capturing.sandbox import lockdown, Sandbox
target, output = sys.argv[1:]
with Sandbox() as box:
    assert lockdown(str(box.scratch), [output])
    import ctypes
    libc = ctypes.CDLL(None)
    assert libc.creat(target.encode(), 0o600) < 0
    assert libc.creat((output + "/trace").encode(), 0o600) >= 0
    with open(target, "w") as file:
        file.write("in the overlay")
    os.replace(target, target + "2")
    assert open(target + "2").read() == "in the overlay"
assert not box.scratch.exists()
"""


@pytest.mark.skipif(not confine.can_confine_files(), reason="this kernel has no Landlock")
def test_lockdown_holds_native_code_too(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "project").mkdir()
    arguments = [str(tmp_path / "project/x"), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": SOURCE}
    subprocess.run([sys.executable, "-c", LOCKED, *arguments], check=True, env=environment)
    assert os.listdir(tmp_path / "project") == []
    assert os.listdir(tmp_path / "out") == ["trace"]


def test_lockdown_says_when_it_cannot(no_landlock: None) -> None:
    assert confine.lockdown("/tmp") is False


LAUNCH = """
import subprocess, sys

def simple_launcher(words):
    subprocess.Popen([sys.executable, "-u", *words]).wait()
"""


def test_what_a_launcher_starts_is_named(tmp_path: Path) -> None:
    """A package that launches its training by itself is told from any other program."""
    launch: dict[str, object] = {"__name__": "accelerate.commands.launch"}
    exec(LAUNCH, launch)
    start: Callable[[list[str]], None] = launch["simple_launcher"]  # type: ignore[assignment]
    with Sandbox():
        with pytest.raises(CaptureError, match=r"it starts `train.py --lr 0.1`") as refused:
            start(["train.py", "--lr", "0.1"])
        assert subprocess.run([sys.executable, "-c", "pass"]).returncode == 0
    assert refused.value.hint.endswith("memplan estimate accelerate launch train.py --lr 0.1")
    start(["-c", "pass"])


def test_a_program_that_starts_its_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's strategies on several devices start the script again for each further rank."""
    module = "lightning.fabric.strategies.launchers.subprocess_script"
    launch: dict[str, object] = {"__name__": module}
    exec(LAUNCH, launch)
    start: Callable[[list[str]], None] = launch["simple_launcher"]  # type: ignore[assignment]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with Sandbox(), pytest.raises(CaptureError, match="starts its other ranks itself") as refused:
        start(["-m", "project.train", "--lr", "0.1"])
    hint = refused.value.hint
    assert hint.endswith("memplan estimate --world-size 4 -m project.train --lr 0.1")
