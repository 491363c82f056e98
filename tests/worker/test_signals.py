"""A signal ends `memplan estimate` cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memplan.worker.process import WorkerProcess, wait_for_any
from memplan.worker.signals import ended_by_signal

WAITS = """
import time, torch
from pathlib import Path
torch.ones(1).cuda()
print("started", flush=True)
while True:
    time.sleep(0.1)
"""


def test_a_signal_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "train.py").write_text(WAITS)
    with subprocess.Popen(
        [sys.executable, "-m", "memplan", "estimate", "--gpu", "l4", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run below nohup inherit a signal that is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "started\n"
        assert list(scratch.glob("memplan-*"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
        assert process.stderr.read() == "memplan: ended by SIGTERM\n"
    assert not list(scratch.glob("memplan-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_swallows_it_is_not_an_answer(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            os.kill(os.getpid(), number)  # at once again: still the same wish
        return 0

    def harmless(*_: object) -> None:
        """What was there before: neither ignored, as below nohup, nor the end of the tests."""

    inherited = signal.signal(number, harmless)
    try:
        assert ended_by_signal(command) == 128 + number
        assert signal.getsignal(number) is harmless
    finally:
        signal.signal(number, inherited)
    assert capsys.readouterr().err == f"memplan: ended by {number.name}\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_in_a_finalizer_ends_the_wait_after_it(number: signal.Signals) -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    class Capturing(WorkerProcess):
        ended = False

        def __init__(self) -> None: ...

    def command() -> int:
        Finalized()
        wait_for_any([Capturing()])
        return 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if number == signal.SIGTERM:
            assert ended_by_signal(command, say=False) == 128 + number
        else:
            with pytest.raises(KeyboardInterrupt):
                ended_by_signal(command, answers=True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_nohup_is_respected() -> None:
    def command() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 7

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ended_by_signal(command) == 7
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_worker_ends_at_once() -> None:
    def command() -> int:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ended_by_signal(command) == -signal.SIGTERM
