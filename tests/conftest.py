"""What all tests share."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import warm

ROOT = Path(__file__).resolve().parent.parent

# Many processes import the same files: what Python has compiled of them is kept, as for users.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Until `prepared_process`: what is imported stays, and no collection finds anything in it.
gc.disable()
# Before torch is imported, here and in every process a test starts: tensors that are computed here
# are tiny, and threads that wait for each other on shared cores take most of the time.
os.environ["OMP_NUM_THREADS"] = "1"
# Likewise: oneDNN's kernels for newer processors (AVX-512, AMX) ask PyTorch for scratch, others do
# not. Real runs, which captures are compared with, ask for the same on every machine.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
# Inductor's kernels for no vector unit are the same everywhere, and made sooner; what the processor
# has need not be found out by compiling for it.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
# A change is judged by the same examples each time. Others are drawn with
# `make test ARGS=--hypothesis-profile=default`.
settings.register_profile("the same", derandomize=True, database=None)
settings.load_profile("the same")


@pytest.fixture(scope="session")
def memplan_test_data() -> Path:
    """The optional folder of real logs, problems and measured jobs; a test without it is skipped.

    `MEMPLAN_SHARED_DATA` names it; else it is looked for beside the checkout.
    """
    folder = Path(os.environ.get("MEMPLAN_SHARED_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: name the folder in MEMPLAN_SHARED_DATA")
    return folder


@pytest.fixture(scope="session", autouse=True)
def prepared_process() -> None:
    """What has to come before the first test, whichever that is.

    The autograd engine counts the devices once, at a process's first backward pass: where that is
    a test's on the CPU, no later test finds the fake device. And a torchvision built for CUDA is
    imported at most once, so its operators must be there beforehand. What all test files import is
    a million objects, which no garbage collection of a test has to look through.
    """
    from memplan.capturing.cuda.device import self_test
    from memplan.capturing.standins.adapters import make_torchvision_importable

    assert self_test().ok, self_test().detail
    warm.capture_here(lambda: warm.server_of(warm.CAPTURE))
    make_torchvision_importable()
    # PyTorch writes down all that it compiles, as JSON, for whoever listens to this logger; pytest
    # listens to each that does not propagate.
    listened_to = logging.Logger.manager.loggerDict.pop("torch.__trace")
    assert isinstance(listened_to, logging.Logger)
    listened_to.handlers.clear()
    warm.rarely_collect_all()


@pytest.fixture(scope="module", autouse=True)
def looked_through_once() -> None:
    """What is there before a file's first test is not collected in it: many tests, and what users
    call from Python, collect garbage, and would look through all that other files imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is done with a plan: how good those are, `tests/recompute` checks."""
    from memplan.recompute import offload, solve

    monkeypatch.setattr(solve, "SMALL_STEPS", 4_000)
    monkeypatch.setattr(solve, "RESTARTS", 1)
    monkeypatch.setattr(offload, "MOVES", 200)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT is Python's, also where the tests run in the background and were told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
