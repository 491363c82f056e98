"""The report as lines of text: what it says, its width, its character sets."""

from __future__ import annotations

import msgspec
import pytest

from memplan.estimation import estimate
from memplan.report.plot import memory_plot
from memplan.report.terminal import estimate_lines
from memplan.report.text import step_text
from memplan.types.device import find_profile
from memplan.types.estimate import (
    EngineEstimate,
    Estimate,
    MemoryCurve,
    RankEstimate,
    StagePeak,
)
from tests.estimation.jobs import MIB, training_job

GIB = 1 << 30


@pytest.fixture
def answer() -> Estimate:
    return estimate(training_job(), find_profile("2GiB"))


def text(answer: Estimate, width: int = 100) -> str:
    return "\n".join(line.plain for line in estimate_lines(answer, width, "do this"))


def test_the_first_line_is_the_answer(answer: Estimate) -> None:
    first = text(answer).splitlines()[0]
    assert first.startswith("peak 1.1 GiB (") and first.endswith(" spare")
    assert " of 2.0 GiB: fits, " in first


@pytest.mark.parametrize(
    "part",
    [
        "optimizer state    256 MiB",
        "at the peak  mm_backward in model.fc1, backward, step 1",
        "train.py:12",
        "64 MiB  4096x4096 float32  w0, parameter  train.py:3",
        "4 x 64 MiB",
        "memory over time",
        "▲ peak",
        "Tokens spread evenly over the experts. (3 times)",
        "kernels  sdpa: flash (4)",
        "events; the step repeats",
        "made by hand",
        "next: do this",
    ],
)
def test_it_says(answer: Estimate, part: str) -> None:
    assert part in text(answer)


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_figures_stay_within_the_width(answer: Estimate, width: int) -> None:
    lines = text(answer, width).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("memory over time"))
    end = next(i for i, line in enumerate(lines) if line.strip().startswith("step 0"))
    assert all(len(line) <= width for line in lines[start + 1 : end + 1])
    largest = next(i for i, line in enumerate(lines) if line.startswith("largest"))
    assert all(len(line) <= max(width, 60) for line in lines[largest + 1 : start])


def test_a_hostile_name_cannot_move_the_cursor(answer: Estimate) -> None:
    tensor = msgspec.structs.replace(answer.largest[0], name="\x1b[2J\x1b[H")
    peak = msgspec.structs.replace(answer.peak, op="\x1b]0;x\x07")
    hostile = msgspec.structs.replace(answer, largest=[tensor], peak=peak, notes=["\x1b[2J"])
    assert "\x1b" not in text(hostile)


def curve(allocated: list[int], reserved: list[int]) -> MemoryCurve:
    count = len(allocated)
    return MemoryCurve(
        events=list(range(0, count * 10, 10)),
        steps=[0] * (count - 1) + [3],
        allocated_bytes=allocated,
        reserved_bytes=reserved,
    )


def test_the_plot_is_drawn_to_scale() -> None:
    lines = memory_plot(
        curve([0, 4 * MIB, 2 * MIB, 1 * MIB], [2 * MIB, 4 * MIB, 4 * MIB, 4 * MIB]),
        width=34,
        height=2,
        peak_event=15,
    )
    assert lines == [
        "     4 MiB │⠀⠀⠀⠀⠀⢸⣿⣿⣿⣿⣿⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉",
        "         0 │⠉⠉⠉⠉⠉⢹⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿⣧⣤⣤⣤⣤⣤",
        "                 ▲ peak     step 3",
    ]


def test_the_room_is_drawn_when_near_and_left_out_when_far() -> None:
    flat = curve([MIB] * 50, [2 * MIB] * 50)
    near = memory_plot(flat, width=60, room_bytes=3 * MIB)
    assert near[0].startswith("     3 MiB") and len(set(near[0][12:])) == 2
    far = memory_plot(flat, width=60, room_bytes=300 * MIB)
    assert far[0].startswith("     2 MiB")


def test_too_narrow_or_empty_draws_nothing() -> None:
    assert memory_plot(curve([1], [1]), width=20) == []
    empty = MemoryCurve(events=[], steps=[], allocated_bytes=[], reserved_bytes=[])
    assert memory_plot(empty, width=80) == []


@pytest.mark.parametrize("place", [0, 250, 499])
def test_the_peak_is_marked_where_it_is(place: int) -> None:
    allocated = [MIB] * 50
    allocated[place // 10] = 9 * MIB
    lines = memory_plot(curve(allocated, [9 * MIB] * 50), width=112, height=4, peak_event=place)
    column = lines[-1].index("▲")
    assert "⣿" in lines[0][column - 1 : column + 1]


def of_ranks(answer: Estimate, *peaks: int) -> Estimate:
    """The answer as that of rank 0 of a job whose ranks were all captured."""
    ranks = [
        RankEstimate(
            rank=rank,
            why="first rank" if rank == 0 else "last rank",
            peak_bytes=peak,
            low_bytes=peak,
            high_bytes=peak,
            reserved_peak_bytes=peak,
            allocated_peak_bytes=peak,
            fits=True,
            host_peak_bytes=(rank + 1) * GIB,
            same_as=0 if rank and peak == peaks[0] else None,
        )
        for rank, peak in enumerate(peaks)
    ]
    host = {f"host_{name}_bytes": GIB for name in ("low", "peak", "high")}
    node = {f"host_node_{name}_bytes": 3 * GIB for name in ("low", "peak", "high")}
    return msgspec.structs.replace(
        answer,
        rank=0,
        world_size=len(peaks),
        ranks=ranks,
        host_processes=len(peaks),
        **host,
        **node,
    )


def test_each_rank_has_its_host_and_the_node_their_sum(answer: Estimate) -> None:
    shown = text(of_ranks(answer, 2 * GIB, GIB))
    assert "rank 0 of 2, which needs most of those captured" in shown
    assert "rank 1  peak 1.0 GiB (1.0–1.0)  host RAM 2.0 GiB  fits, last rank" in shown
    assert "host RAM     1.0 GiB (1.0–1.0) of this process\n" in shown
    assert "             3.0 GiB (3.0–3.0) of the 2 ranks of a node together" in shown
    alike = text(of_ranks(answer, GIB, GIB))
    assert "rank 0 of 2; the others captured need the same" in alike


def test_a_rank_gets_the_verdict_of_the_headline(answer: Estimate) -> None:
    """Expected to fit, but not for certain: may not; expected not to: does not."""
    assert answer.gpu is not None
    total = answer.gpu.total_bytes
    one = of_ranks(answer, total - GIB, total + GIB)
    ranks = [msgspec.structs.replace(item, fits=False) for item in one.ranks]
    for item in ranks:
        peak = {"peak_bytes": item.peak_bytes, "fits": False, "missing_bytes": GIB}
        shown = text(msgspec.structs.replace(one, ranks=ranks, rank=item.rank, **peak))
        verdict = "may not fit" if item.rank == 0 else "does not fit"
        assert f": {verdict}, up to" in shown.splitlines()[0]
        assert f"{verdict}, {item.why}" in shown


def test_gathered_parameters_are_apart_from_temporaries(answer: Estimate) -> None:
    parts = msgspec.structs.replace(answer.breakdown, temporaries=300 * MIB)
    one = msgspec.structs.replace(answer, breakdown=parts, gathered_parameter_bytes=200 * MIB)
    shown = text(one)
    assert any(
        line.startswith("  gathered parameters    200 MiB") and line.endswith("FSDP all-gather")
        for line in shown.splitlines()
    )
    assert "  temporaries            100 MiB" in shown
    assert "gathered" not in text(answer)


@pytest.mark.parametrize("width", [40, 80, 110])
def test_the_breakdown_stays_within_the_width(answer: Estimate, width: int) -> None:
    lines = text(answer, width).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  optimizer state"))
    end = lines.index("", start)
    assert all(len(line) <= max(width, 60) for line in lines[start:end])
    explained = any(line.endswith("used by nobody") for line in lines)
    assert explained == (width > 40)


@pytest.mark.parametrize(
    ("step", "phase", "steps", "said"),
    [
        (0, "setup", 3, "before step 0"),
        (0, "forward", 3, "step 0"),
        (2, "backward", 3, "step 2"),
        (3, "evaluation", 3, "after step 2"),
        (3, "forward", 3, "step 3"),
        (0, "evaluation", 0, "step 0"),
    ],
)
def test_steps_count_from_0(step: int, phase: str, steps: int, said: str) -> None:
    assert step_text(step, phase, steps) == said


def test_the_chart_ends_with_the_last_step() -> None:
    job = curve([0, 4, 2, 1], [2, 4, 4, 4])  # its last bucket begins after three steps
    assert memory_plot(job, width=60, steps=3)[-1].endswith("step 2")
    assert memory_plot(job, width=60, steps=4)[-1].endswith("step 3")


def beside_an_engine(answer: Estimate, **engine: object) -> str:
    settings: dict[str, object] = {"name": "vllm", "model": "m", "share": 0.25, "sleeps": True}
    settings |= {"weight_bytes": GIB, "kv_cache_bytes": 5 * GIB, "separate": False, **engine}
    stages = [
        StagePeak(
            stage=stage,
            peak_bytes=peak * GIB,
            high_bytes=peak * GIB,
            in_use_bytes=2 * GIB,
            engine_bytes=GIB,
            step=1,
        )
        for stage, peak in (("generation", 13), ("training", 9))
    ]
    engines = [msgspec.convert(settings, EngineEstimate)]
    return text(msgspec.structs.replace(answer, stages=stages, engines=engines), 60)


def test_stages_and_engines_have_lines_of_their_own(answer: Estimate) -> None:
    said = beside_an_engine(answer, largest_share=0.4)
    assert "on the card  generation     13.0 GiB, in use 2.0 GiB\n" in said
    assert "             training        9.0 GiB, in use 2.0 GiB\n" in said
    assert "vllm         0.25 of the card: weights 1.0 GiB, KV cache 5.0 GiB\n" in said
    assert "             gpu_memory_utilization up to 0.40 fits\n" in said
    none = beside_an_engine(answer, why="the training needs all", separate=True)
    assert "KV cache 5.0 GiB, in a process of its own\n" in none
    assert "             no gpu_memory_utilization fits: the training needs all\n" in none
    assert "on the card" not in text(answer)
