"""Captured ranks of compiled models under FSDP2 and DDP ask for what the same ranks ask for in a
real run over gloo, on the CPU, in the same order."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from memplan.capturing.session import CaptureSession
from tests.capturing.distributed import compiled_jobs as jobs
from tests.capturing.distributed.ranks import join, options, requests
from tests.capturing.distributed.real_ranks import Sizes, run_module
from tests.capturing.distributed.test_sharded import JOINED, LAYER, SMALL

EXTRA: dict[str, set[int]] = {
    "checkpointed_blocks": {LAYER, LAYER // 2, *JOINED},
    "replicated_inside": set(),
    "replicated_outside": set(),
}
"""What the CPU and gloo ask for besides: see `test_sharded`."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Sizes]:
    """By world size and rank, the sizes of each job's second step."""
    return run_module(jobs.__name__, tmp_path_factory.mktemp("real"))


@pytest.mark.parametrize("name", EXTRA)
def test_a_rank_asks_for_what_it_really_does(real: dict[tuple[int, int], Sizes], name: str) -> None:
    torch._dynamo.reset()
    with CaptureSession(options(1, jobs.SIZE, steps=10)) as session:
        join()
        step = jobs.JOBS[name]("cuda")
        step()
        start = len(session.state.recorder.builder)
        step()
        trace = session.trace()
    assert not trace.meta.assumptions
    ours = [event.bytes for event in requests(trace, start) if event.bytes > SMALL]
    theirs = [size for size in real[jobs.SIZE, 1][name] if size > SMALL]
    rest = iter(theirs)
    assert all(size in rest for size in ours), "something is asked for that is not really"
    more = Counter(theirs) - Counter(ours)
    assert set(more) <= EXTRA[name], more
