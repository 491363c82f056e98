"""A process that captures: what it leaves, and what is said of one that leaves nothing."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.types.device import find_profile
from memplan.types.plan import OrderPart, Plan
from memplan.types.trace_file import load_trace
from memplan.worker.failure import CaptureFailedError
from memplan.worker.process import WorkerProcess, outcome_of_process
from memplan.worker.request import CaptureRequest, Outcome

TRAINS = """
import atexit, sys, torch
atexit.register(print, "printed at the end")
class End:
    def __del__(self):
        print("taken apart")
sys.end = End()
print("stdin", repr(sys.stdin.read()), sys.argv)
net = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
"""
LEAVES = """
import atexit, threading
atexit.register(print, "printed at the end")
threading.Thread(target=threading.Event().wait).start()
"""
WAITS = """
import time, torch
torch.ones(1).cuda()
print("it began", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have them: everywhere else they are forked (`tests/warm.py`)."""
    monkeypatch.setattr("memplan.worker.process.subprocess", subprocess)


def asked(folder: Path, script: str) -> CaptureRequest:
    path = folder / "train.py"
    path.write_text(script)
    return CaptureRequest(
        program=ScriptTarget("script", str(path), ("--lr", "3 4")),
        options=CaptureOptions(profile=find_profile("l4")),
    )


def test_request_in_trace_and_outcome_out(tmp_path: Path) -> None:
    plan = Plan(order=OrderPart(parameters=2, gradient_bytes=0, from_first=False))
    request = msgspec.structs.replace(asked(tmp_path, TRAINS), plan=plan)
    trace = tmp_path / "job.trace"
    done = subprocess.run(
        [sys.executable, "-m", "memplan.worker", str(trace)],
        input=request.encoded(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout, type=Outcome) == Outcome()
    said = done.stderr.decode()
    assert f"stdin '' {[request.program.name, '--lr', '3 4']}" in said
    assert "printed at the end" in said
    assert "taken apart" not in said, "Python would look through all of PyTorch as it ends"
    meta = load_trace(trace).meta
    assert meta.command == [request.program.name, "--lr", "3 4"]
    assert list(meta.unmet) == ["order"] and meta.notes[-1] == meta.unmet["order"]
    assert meta.notes[-1].endswith("gradients are kept from one backward pass to the next")


@pytest.mark.usefixtures("processes_of_their_own")
def test_one_that_waited_captures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the command is typed in may hold modules named like some that it imports."""
    request = asked(tmp_path, TRAINS)
    (tmp_path / "typed_in").mkdir()
    (tmp_path / "typed_in" / "copy.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path / "typed_in")
    traces = []
    for first in (request, None):
        with WorkerProcess(first, tmp_path / "job.trace", quiet=True) as process:
            if first is None:
                while "libtorch" not in Path(f"/proc/{process.process.pid}/maps").read_text():
                    assert not process.ended
                process.ask(request)
            traces.append(process.trace())
    plain, waited = traces
    assert plain.strings == waited.strings
    for column in dataclasses.fields(plain.events):
        found = (getattr(trace.events, column.name) for trace in traces)
        assert np.array_equal(*found), column.name


@pytest.mark.usefixtures("processes_of_their_own")
def test_one_that_is_not_asked_ends_with_who_started_it(tmp_path: Path) -> None:
    process = WorkerProcess(None, tmp_path / "job.trace", quiet=True)
    assert not process.ended
    process.dismiss()
    assert process.ended


def failure(request: CaptureRequest, folder: Path, end: signal.Signals | None) -> str:
    with WorkerProcess(request, folder / "job.trace", quiet=True) as process:
        if end is not None:
            wait_for_the_script(process)
            process.process.send_signal(end)
        with pytest.raises(CaptureFailedError) as failed:
            process.trace()
    assert "it began" in failed.value.wrote
    assert not process.path.exists()
    outcome = failed.value.outcome
    return f"{outcome.kind} {outcome.exit_code}: {outcome.reason}"


def wait_for_the_script(process: WorkerProcess) -> None:
    """The sandbox keeps the file that it writes; what it prints is seen."""
    assert process._kept is not None
    while b"it began" not in os.pread(process._kept.fileno(), 1 << 16, 0):
        assert not process.ended
        time.sleep(0.05)


def test_a_script_that_fails(tmp_path: Path) -> None:
    script = "import torch\nprint('it began', flush=True)\nraise ValueError('no data\\nat all')\n"
    request = asked(tmp_path, script)
    name = request.program.name
    said = failure(request, tmp_path, None)
    assert said == f"not_captured 4: {name}:3: the script raised ValueError: no data"


def test_a_message_that_is_no_text(tmp_path: Path) -> None:
    request = asked(tmp_path, "print('it began')\nraise ValueError('file ' + chr(0xDCFF))")
    assert failure(request, tmp_path, None).endswith(r"ValueError: file \udcff")


@pytest.mark.parametrize("script", [TRAINS, "raise ValueError"], ids=["captured", "raises"])
@pytest.mark.parametrize("module", ["memplan.worker", "memplan"])
def test_threads_that_the_program_leaves_are_not_waited_for(
    tmp_path: Path, script: str, module: str
) -> None:
    request = asked(tmp_path, LEAVES + script)
    words = [str(tmp_path / "job.trace")]
    if module == "memplan":
        words = ["estimate", "--gpu", "l4", request.program.name]
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        input=request.encoded(),
        capture_output=True,
        timeout=100,
    )
    assert b"printed at the end" in done.stdout + done.stderr and done.stdout
    assert done.returncode == (4 if "raise" in script else 0)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (signal.SIGKILL, "out_of_memory 4: {} SIGKILL, as Linux does where memory runs out"),
        (signal.SIGTERM, "not_captured 4: {} SIGTERM"),
        (signal.SIGSEGV, "error 1: {} SIGSEGV"),
    ],
)
def test_one_that_a_signal_ended(tmp_path: Path, end: signal.Signals, said: str) -> None:
    assert failure(asked(tmp_path, WAITS), tmp_path, end) == said.format("the capture was ended by")


def test_one_that_ends_before_it_is_asked() -> None:
    outcome = outcome_of_process(1, b"")
    assert (outcome.kind, outcome.exit_code) == ("error", 1)
    assert outcome.reason == "the process that captures ended with 1 and without an answer"


def test_nonsense_is_an_outcome_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memplan.worker", str(tmp_path / "job.trace")],
        input=b"{}",
        capture_output=True,
    )
    outcome = msgspec.json.decode(done.stdout, type=Outcome)
    assert (done.returncode, outcome.kind) == (2, "error")
    assert outcome.reason.startswith("not a request for a capture")
