"""A captured rank asks for what the same rank asks for in a real run over gloo, on the CPU."""

from __future__ import annotations

from collections import Counter

import pytest

from memplan.capturing.session import CaptureSession
from tests.capturing.distributed import gloo_job
from tests.capturing.distributed.ranks import join, options, requests
from tests.capturing.distributed.real_ranks import Sizes, run_module


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Sizes]:
    """By world size and rank, for each job, the sizes that its third step asks for."""
    return run_module(gloo_job.__name__, tmp_path_factory.mktemp("gloo"))


def captured(name: str, rank: int) -> list[int]:
    with CaptureSession(options(rank, gloo_job.SIZE, steps=10)) as session:
        join()
        step = gloo_job.JOBS[name]("cuda")
        step()
        step()
        start = len(session.state.recorder.builder)
        step()
        trace = session.trace()
    return [event.bytes for event in requests(trace, start) if event.bytes > gloo_job.SMALL]


@pytest.mark.parametrize("rank", range(gloo_job.SIZE))
@pytest.mark.parametrize("name", gloo_job.JOBS)
def test_a_rank_asks_for_what_it_really_does(
    real: dict[tuple[int, int], Sizes], name: str, rank: int
) -> None:
    ours = captured(name, rank)
    theirs = [size for size in real[gloo_job.SIZE, rank][name] if size > gloo_job.SMALL]
    if name == "ddp":
        assert ours == theirs
        return
    # Gloo copies what it sends and receives, in buffers of its own; and where the ranks do not
    # divide a dimension (301), the CPU's `chunk_cat` pads in memory, CUDA's kernel does not.
    gathered = {4 * 2 * 151 * 101, 4 * 2 * 35 * 302}
    scattered = {4 * 151 * 101, 4 * 35 * 302}
    padded = {4 * 302 * 100, 4 * 302}
    extra = Counter(theirs) - Counter(ours)
    assert not Counter(ours) - Counter(theirs)
    assert set(extra) <= gathered | scattered | padded
    assert all(extra[size] == 1 for size in padded)
