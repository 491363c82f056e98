"""A captured rank asks for what the same rank asks for in a real run over gloo, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from memplan.capture.session import CaptureSession
from tests.capture.distributed import gloo_job
from tests.capture.distributed.ranks import join, options, requests

SIZE = 2


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[list[int]]]:
    """Name of the job and, for each rank, the sizes of the third step."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    command = [sys.executable, str(Path(gloo_job.__file__)), name]
    ranks = [
        subprocess.Popen([*command, str(rank), str(SIZE), str(folder)], stderr=subprocess.PIPE)
        for rank in range(SIZE)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()
    return name, [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(SIZE)]


def captured(name: str, rank: int) -> list[int]:
    with CaptureSession(options(rank, SIZE, steps=10)) as session:
        join()
        step = gloo_job.JOBS[name]("cuda")
        step()
        step()
        start = len(session.mode.recorder.builder)
        step()
        trace = session.trace()
    return [event.bytes for event in requests(trace, start) if event.bytes > gloo_job.SMALL]


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_asks_for_what_it_really_does(real: tuple[str, list[list[int]]], rank: int) -> None:
    name, sizes = real
    ours, theirs = captured(name, rank), sizes[rank]
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
