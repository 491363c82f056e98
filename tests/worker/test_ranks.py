"""The ranks of a job: which are captured, and what is said of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.types.trace_file import load_trace
from memplan.worker.rank_choice import MOST_CAPTURES, Requests, next_ranks, uncaptured

SCRIPT = """
import os, sys, time, torch
rank = int(os.environ["RANK"])
print("rank", rank, sys.argv[1:], os.environ.get("A"), file=sys.stderr, flush=True)
if "wait" in sys.argv:
    time.sleep(600)
if "fail" in sys.argv and rank:
    raise ValueError("only rank 0 has the data")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
width = 16384 if rank else 512
net = torch.nn.Linear(1024, width).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def kind(name: str, count: int = 1) -> Requests:
    return Requests(count, name.encode(), 0)


def captured_in_turn(ranks: list[Requests]) -> dict[int, Requests]:
    """What would be captured of a job whose ranks are these."""
    seen: dict[int, Requests] = {}
    while wanted := next_ranks(seen, len(ranks)):
        assert not wanted.keys() & seen.keys()
        seen |= {rank: ranks[rank] for rank in wanted}
    return seen


def test_all_alike() -> None:
    seen = captured_in_turn([kind("a")] * 64)
    assert sorted(seen) == [0, 63]
    assert uncaptured(seen, 64) == [
        "ranks 1 to 62: taken to be like 0 and 63, which ask for the same memory; one that holds "
        "larger shapes is not seen, and --rank 31 captures one"
    ]


def test_two_between() -> None:
    seen = {0: kind("a"), 3: kind("a"), 5: kind("a")}
    said = [text.partition(":")[0] for text in uncaptured(seen, 6)]
    assert said == ["ranks 1 and 2", "rank 4"]


def test_the_first_rank_does_more() -> None:
    seen = captured_in_turn([kind("evaluates", 9), *[kind("a")] * 63])
    assert sorted(seen) == [0, 1, 32, 63]


def test_shards_that_are_not_even() -> None:
    seen = captured_in_turn([*[kind("large")] * 63, kind("small")])
    assert sorted(seen) == [0, 1, 32, 63]
    assert uncaptured(seen, 64)[-1].startswith(
        "ranks 33 to 62: taken to need no more than 32 or 63"
    )


def test_stages_of_a_pipeline() -> None:
    stages = [kind(f"stage {rank // 4}", 10 + rank // 4) for rank in range(16)]
    seen = captured_in_turn(stages)
    assert {stages[rank] for rank in seen} == set(stages)
    assert len(seen) == MOST_CAPTURES
    assert any("not captured, between ranks" in text for text in uncaptured(seen, 16))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_jobs(size: int) -> None:
    ranks = [kind(str(rank), rank) for rank in range(size)]
    seen = captured_in_turn(ranks)
    assert sorted(seen) == list(range(size))
    assert uncaptured(seen, size) == []


# Real captures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "job" / "train.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "memplan", "estimate", *line.split()],
        cwd=folder / "job",
        env=os.environ | {"TMPDIR": str(folder / "scratch")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )


def test_the_answer_is_the_largest_rank(folder: Path) -> None:
    line = "--gpu l4 --json -o job.trace env A=B torchrun --nproc-per-node 2 train.py --x"
    process = start(folder, line)
    out, err = process.communicate()
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert (answer["rank"], answer["world_size"]) == (1, 2)
    first, last = answer["ranks"]
    assert (first["rank"], last["rank"]) == (0, 1)
    assert first["allocated_peak_bytes"] < last["allocated_peak_bytes"]
    assert last["peak_bytes"] == answer["peak_bytes"]
    assert first["same_as"] is None and last["same_as"] is None
    assert answer["command"] == ["train.py", "--x"]
    assert "rank 0 ['--x'] B" in err and "rank 1 [" not in err
    assert "memplan: capturing ranks 0 and 1 of 2\n" in err
    assert len(load_trace(folder / "job" / "job.trace")) == answer["events"]
    assert sorted(p.name for p in (folder / "job").iterdir()) == ["job.trace", "train.py"]


def test_a_rank_that_fails(folder: Path) -> None:
    process = start(folder, "--world-size 2 --rank all train.py fail")
    out, err = process.communicate()
    assert (process.returncode, out) == (4, "")
    assert "ValueError: only rank 0 has the data" in err
    assert err.splitlines()[-2] == "memplan: error: rank 1 gave no answer (above)"


def test_a_signal_ends_every_capture(folder: Path) -> None:
    with start(folder, "torchrun --nproc-per-node 2 train.py wait") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "memplan: capturing ranks 0 and 1 of 2\n"
        assert process.stderr.readline().startswith("rank 0")
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
        assert process.stderr.read().splitlines() == ["memplan: ended by SIGTERM"]
    assert not list((folder / "scratch").glob("memplan-*"))
