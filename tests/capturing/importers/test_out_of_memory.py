"""Jobs that ran out of memory: histories written by hand in the layout that PyTorch's binding
documents, with figures worked out on paper."""

from __future__ import annotations

import pickle
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memplan.capturing.importers.out_of_memory import read_out_of_memory
from memplan.estimation.out_of_memory import explain_out_of_memory
from memplan.report.out_of_memory import out_of_memory_lines
from memplan.types.device import find_profile
from memplan.types.errors import NoAnswerError
from memplan.types.out_of_memory import OomExplanation, OutOfMemory
from memplan.types.trace import EventKind, Trace
from tests import warm
from tests.capturing.importers.snapshot_maker import MIB, STREAMS, Maker
from tests.schemas import read_answer

TORCH = "/usr/lib/python3.11/site-packages/torch/"


def frames(line: int, *inside: tuple[str, str]) -> list[dict[str, Any]]:
    """A stack, innermost first: files of PyTorch, then the user's script."""
    torch = [{"filename": TORCH + file, "line": 1, "name": name} for file, name in inside]
    own = [("/home/u/train.py", line, "step"), ("/home/u/train.py", 90, "<module>")]
    return torch + [{"filename": file, "line": at, "name": name} for file, at, name in own]


FORWARD = ("nn/modules/linear.py", "forward")
OPTIMIZER = ("optim/adamw.py", "step")


def read(folder: Path, snapshot: dict[str, Any]) -> tuple[OutOfMemory, Trace]:
    path = folder / "oom.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    return read_out_of_memory(path)


def explained(folder: Path, maker: Maker, gpu: str | None = None) -> OomExplanation:
    oom, trace = read(folder, maker.snapshot())
    return explain_out_of_memory(oom, trace, find_profile(gpu) if gpu else None)


def fragmented() -> Maker:
    """200 MiB of room. Five segments of 40 MiB, each with a block of 24 and one of 16 MiB; the
    larger ones are released. 120 MiB are free in pieces of 24, and 30 MiB are asked for."""
    maker = Maker(capacity=200 * MIB)
    held = []
    for _ in range(5):
        whole = maker.malloc(40 * MIB, frames=frames(10))
        maker.free(whole)
        large = maker.malloc(24 * MIB, frames=frames(20, FORWARD))
        maker.malloc(16 * MIB, frames=frames(30, FORWARD))
        held.append(large)
    for address in held:
        maker.free(address)
    with pytest.raises(MemoryError):
        maker.malloc(30 * MIB - 100, frames=frames(40, FORWARD))
    return maker


def test_what_the_history_shows(tmp_path: Path) -> None:
    oom, trace = read(tmp_path, fragmented().snapshot())
    assert oom.asked_bytes == 30 * MIB
    assert (oom.reserved_bytes, oom.allocated_bytes) == (200 * MIB, 80 * MIB)
    assert (oom.device_free_bytes, oom.room_bytes) == (0, 200 * MIB)
    assert (oom.source, oom.phase, oom.failures) == ("/home/u/train.py:40", "forward", 1)
    assert oom.stack == ["/home/u/train.py:40 step", "/home/u/train.py:90 <module>"]
    assert sorted(piece.bytes for piece in oom.free) == [24 * MIB] * 5
    assert oom.largest_free() == 24 * MIB
    assert trace.events.kind[oom.event] == EventKind.OUT_OF_MEMORY


def test_fragmentation(tmp_path: Path) -> None:
    answer = explained(tmp_path, fragmented())
    assert answer.reproduced and answer.fits
    assert (answer.unallocated_bytes, answer.missing_bytes) == (120 * MIB, 0)
    (consumer,) = answer.consumers
    assert (consumer.source, consumer.bytes, consumer.blocks) == (
        "/home/u/train.py:30",
        80 * MIB,
        5,
    )
    assert answer.by_phase == {"forward": 80 * MIB}
    expandable, cache = answer.remedies
    assert expandable.change == "PYTORCH_ALLOC_CONF=expandable_segments:True" and expandable.fits
    assert expandable.how == "replayed"
    assert not cache.fits and cache.spare_bytes == -30 * MIB


def test_too_much_for_any_layout(tmp_path: Path) -> None:
    """Of 200 MiB, 100 are parameters, 60 activations; 50 more are asked for: 10 are missing."""
    maker = Maker(capacity=200 * MIB)
    maker.malloc(100 * MIB, frames=frames(5))
    maker.malloc(60 * MIB, frames=frames(20, FORWARD))
    with pytest.raises(MemoryError):
        maker.malloc(50 * MIB, frames=frames(21, FORWARD))
    answer = explained(tmp_path, maker)
    assert (answer.fits, answer.reproduced, answer.missing_bytes) == (False, True, 10 * MIB)
    assert answer.device_free_bytes == 40 * MIB and answer.unallocated_bytes == 0
    assert answer.by_phase == {"setup": 100 * MIB, "forward": 60 * MIB}
    expandable, _, batch = answer.remedies
    assert not expandable.fits and expandable.spare_bytes == -20 * MIB  # in pages of 20 MiB
    assert batch.change == "a batch smaller by 10 % or more" and batch.fits  # 10 of 60 + 50


def test_what_came_after_the_failure_is_undone(tmp_path: Path) -> None:
    maker = fragmented()
    whole = read(tmp_path, maker.snapshot())[0]
    for address in maker.live():
        maker.free(address)
    maker.empty_cache()
    assert not maker.segments
    later = read(tmp_path, maker.snapshot())[0]
    assert later == whole


def test_random_runs(tmp_path: Path) -> None:
    """The state at the failure, found by undoing what followed, is the one that was there."""
    for seed in range(20):
        rng = random.Random(seed)
        maker = Maker(capacity=rng.randrange(60, 200) * MIB)
        streams = [0, *STREAMS]
        try:
            while True:
                live = maker.live()
                if live and rng.random() < 0.4:
                    maker.free(rng.choice(live), wait=rng.random() < 0.2)
                else:
                    size = rng.choice([rng.randrange(1, MIB), rng.randrange(MIB, 30 * MIB)])
                    maker.malloc(size, rng.choice(streams), frames(rng.randrange(5)))
        except MemoryError:
            segments = maker.states[-1]
        for address in maker.live()[::2]:
            maker.free(address)
        oom, _ = read(tmp_path, maker.snapshot())
        blocks = [block for segment in segments for block in segment.blocks]
        assert oom.reserved_bytes == sum(segment.size for segment in segments)
        assert oom.allocated_bytes == sum(b.size for b in blocks if b.state != "inactive")
        assert sum(b.waits for b in oom.held) == sum(
            b.state == "active_pending_free" for b in blocks
        )
        assert sum(p.bytes for p in oom.free) == oom.reserved_bytes - oom.allocated_bytes
        assert maker.capacity == oom.room_bytes


def test_a_history_that_begins_late(tmp_path: Path) -> None:
    """Blocks from before the ring buffer's first entry tell their origin in the segments."""
    maker = fragmented()
    oom, trace = read(tmp_path, maker.snapshot(max_entries=6))
    assert oom.allocated_bytes == 80 * MIB
    assert {(b.source, b.phase) for b in oom.held} == {("/home/u/train.py:30", "before")}
    answer = explain_out_of_memory(oom, trace)
    assert answer.fits and "without gaps" in answer.remedies[0].detail


def test_the_last_of_several_failures(tmp_path: Path) -> None:
    maker = Maker(capacity=100 * MIB)
    with pytest.raises(MemoryError):
        maker.malloc(300 * MIB, frames=frames(1))
    maker.malloc(60 * MIB, frames=frames(2))
    with pytest.raises(MemoryError):
        maker.malloc(50 * MIB, frames=frames(3))
    answer = explained(tmp_path, maker)
    assert (answer.failures, answer.asked_bytes, answer.missing_bytes) == (2, 50 * MIB, 10 * MIB)
    assert answer.reproduced


def test_another_process_on_the_card(tmp_path: Path) -> None:
    """A card of 4 GiB of which this process could have 200 MiB only."""
    answer = explained(tmp_path, fragmented(), "4GiB")
    card = find_profile("4GiB")
    assert answer.outside_bytes == 4096 * MIB - 200 * MIB
    assert answer.other_processes_bytes == answer.outside_bytes - card.context_high_bytes
    assert answer.remedies[-1].change == "no other process on the GPU"
    assert answer.remedies[-1].fits and answer.remedies[-1].how == "by the figures"
    small = explained(tmp_path, fragmented(), "100MiB")
    assert small.outside_bytes is None and "ran on a larger card" in small.notes[0]


def test_expandable_segments_already_on(tmp_path: Path) -> None:
    maker = fragmented()
    snapshot = maker.snapshot()
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    oom, trace = read(tmp_path, snapshot)
    answer = explain_out_of_memory(oom, trace)
    assert [one.change for one in answer.remedies] == ["torch.cuda.empty_cache() before it"]
    assert not answer.fits


def test_snapshots_without_the_free_memory_or_frames(tmp_path: Path) -> None:
    snapshot = fragmented().snapshot()
    entry = snapshot["device_traces"][0][-1]
    assert entry["action"] == "oom"
    del entry["device_free"], entry["frames"]
    oom, trace = read(tmp_path, snapshot)
    answer = explain_out_of_memory(oom, trace)
    assert (answer.room_bytes, answer.missing_bytes, answer.fits) == (None, None, False)
    assert (answer.source, answer.stack) == ("", [])
    assert "a place that was not recorded" in next(out_of_memory_lines(answer)).plain


def test_no_failure(tmp_path: Path) -> None:
    maker = Maker()
    maker.malloc(5 * MIB)
    with pytest.raises(NoAnswerError, match="no request of its history failed"):
        read(tmp_path, maker.snapshot())


def memplan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.memplan(folder, "estimate", *words)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "oom.pickle").write_bytes(pickle.dumps(fragmented().snapshot()))
    done = memplan(tmp_path, "--gpu", "4GiB", "--from-snapshot", "oom.pickle")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("out of memory: 30 MiB asked for at /home/u/train.py:40 (")
    assert lines[0].endswith("step 0), 0 B free on the device")
    assert any("120 MiB reserved but in no block" in line for line in lines)
    assert lines[-1].endswith(
        "PYTORCH_ALLOC_CONF=expandable_segments:True python /home/u/train.py …"
    )
    done = memplan(tmp_path, "--json", "--from-snapshot", "oom.pickle")
    assert read_answer("estimate-from-snapshot", done.stdout)["missing_bytes"] == 0
    done = memplan(tmp_path, "--from-snapshot", "oom.pickle", "train.py")
    assert done.returncode == 2 and "train.py is not needed" in done.stderr
    done = memplan(tmp_path, "--steps", "3", "--from-snapshot", "oom.pickle")
    assert done.returncode == 2 and "--steps with --from-snapshot" in done.stderr
