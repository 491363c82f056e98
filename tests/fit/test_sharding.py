"""Changes of a job that shard it more, and optimizers whose state is smaller."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.fit.answer import Change
from memplan.fit.nearest import nearest_changes
from memplan.fit.options import find_switches
from memplan.fit.search import Search
from memplan.fit.sharding import more_ranks, with_options
from memplan.fit.small_state import in_8bit, smaller_states
from memplan.fit.state import Job, MoreNodes, State, first_state
from memplan.fit.what_if import with_less
from memplan.types.device import find_profile
from memplan.types.plan import OrderPart, Plan, StatePart
from memplan.types.trace import Communicator, Role
from memplan.worker.captures import Captured
from tests.estimation.jobs import MIB, training_job
from tests.fit.chain_job import ChainProgram, capturing, not_captured

CARD = find_profile("4GiB")


def script(folder: Path, source: str, *argv: str) -> ScriptTarget:
    path = folder / "train.py"
    path.write_text(source)
    return ScriptTarget("script", str(path), argv)


def state(program: ScriptTarget, weight: dict[int, int], **more: object) -> State:
    """A job of 8 ranks, whose layers have these many MiB by how many times the nodes there are."""

    def wider(times: int) -> MoreNodes | None:
        if times not in weight:
            return None
        capture = ChainProgram(CARD, weight=weight[times] * MIB)
        return MoreNodes(8 * times, capture, ("torchrun", "--nnodes", str(times), program.name))

    capture = ChainProgram(CARD, weight=weight[1] * MIB)
    job = Job(program, CARD, capture, Search(), ranks=8, more_nodes=wider)
    return first_state(job, capture(program))


@pytest.mark.parametrize(
    ("weight", "ranks"),
    [
        ({1: 64, 2: 8, 4: 4, 8: 2}, 16),
        ({1: 64, 2: 32, 4: 8, 8: 4}, 32),
        ({1: 64, 2: 32, 4: 24, 8: 8}, 64),
    ],
)
def test_the_fewest_ranks_that_fit_are_captured(
    tmp_path: Path, weight: dict[int, int], ranks: int
) -> None:
    before = state(script(tmp_path, ""), weight)
    assert not before.fits
    change, _ = more_ranks(before)
    assert change is not None and (change.before, change.after) == (8, ranks)
    assert change.launch == ["torchrun", "--nnodes", str(ranks // 8), before.job.program.name]
    assert change.high_bytes <= CARD.total_memory_bytes and change.fits
    assert f"captured with {ranks} ranks (an update takes {ranks // 8} times" in change.verified


def test_ranks_that_are_not_enough(tmp_path: Path) -> None:
    change, said = more_ranks(state(script(tmp_path, ""), {1: 128, 2: 100, 4: 80, 8: 64}))
    assert change is None and said.startswith("64 ranks are not enough: each needs peak")


def test_ranks_that_cannot_be_enough_are_not_captured(tmp_path: Path) -> None:
    before = state(script(tmp_path, ""), {1: 1024, 2: 512, 4: 256, 8: 128})
    change, said = more_ranks(before)
    assert change is None and said.startswith("64 ranks are not enough: an eighth")
    assert not before.job.search.captures


def test_more_ranks_of_a_job_that_shards_nothing(tmp_path: Path) -> None:
    assert more_ranks(state(script(tmp_path, ""), dict.fromkeys((1, 2, 4, 8), 64))) == (None, "")
    assert more_ranks(state(script(tmp_path, ""), {1: 64})) == (None, "")


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_state_that_is_sharded_is_not_sharded_once_more(tmp_path: Path, collective: str) -> None:
    before = state(script(tmp_path, ""), {1: 64})
    trace = before.captured.trace
    group = Communicator(ranks=8, local_ranks=8, nodes=1, collectives=[collective])
    meta = msgspec.structs.replace(trace.meta, communicators=[group])
    captured = replace(before.captured, trace=replace(trace, meta=meta))
    of_rank = replace(before, captured=captured)
    changes, tried = nearest_changes(of_rank, of_rank, of_rank)
    said = [one.kind for one in changes] + tried
    assert any("sharded_optimizer" in one or "GPUs" in one for one in said) == (
        collective == "all_reduce"
    )


@pytest.mark.parametrize("steps", [True, False])
def test_nothing_is_said_of_an_optimizer_that_a_job_does_not_have(
    tmp_path: Path, steps: bool
) -> None:
    before = state(script(tmp_path, ""), {1: 64})
    captured, trace = before.captured, before.captured.trace
    if not steps:
        less = with_less(trace, trace.storages.role == Role.OPTIMIZER_STATE, 0, 1)
        roles = np.where(less.storages.role == Role.OPTIMIZER_STATE, 0, less.storages.role)
        trace = replace(less, storages=replace(less.storages, role=roles))
    job = replace(before, captured=replace(captured, trace=trace))
    _, tried = nearest_changes(job, job, job)
    assert ("no optimizer state was seen on the card that could be sharded" in tried) != steps


SWITCHES = """
add = parser.add_argument
add("--reshard", action=argparse.BooleanOptionalAction, default=True)
add("--cpu-offload", action="store_true")
add("--no-full-shard", action="store_true")
add("--zero3", type=int, default=0)
add("--compile", action="store_true")
"""
_NAMES = frozenset({"reshard", "cpu_offload", "full_shard", "zero3"})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", {"--cpu-offload": "--cpu-offload"}),
        ("--cpu-offload", {}),
        ("--cpu-offload --no-reshard", {"--reshard": "--cpu-offload --reshard"}),
        ("--no-reshard --reshard --cpu-offload", {}),
        ("--no-full-shard --cpu-offload", {"without --no-full-shard": "--cpu-offload"}),
    ],
)
def test_switches_that_are_off(tmp_path: Path, given: str, found: dict[str, str]) -> None:
    program = script(tmp_path, SWITCHES, *given.split())
    switches = find_switches(program, _NAMES)
    assert {one.words(on=True): shlex.join(one.on(program).argv) for one in switches} == found


@pytest.mark.parametrize(
    ("source", "given", "least", "expected"),
    [
        ('add("--zero-stage", type=int, default=1)', "", 3, "--zero-stage 1 -> 3"),
        ('add("--zero-stage", type=int, default=1)', "--zero-stage=2", 3, "--zero-stage 2 -> 3"),
        (
            "",
            "--parallelism.tensor_parallel_degree 2",
            4,
            "--parallelism.tensor_parallel_degree 2 -> 4",
        ),
        ("", "--tp 1", 2, "--tp 1 -> 2"),
        ("", "--tp 8", 2, ""),
        ("", "--zero-stage 3", 2, ""),
    ],
)
def test_the_least_value_that_shards_enough(
    tmp_path: Path, source: str, given: str, least: int, expected: str
) -> None:
    before = state(script(tmp_path, source, *given.split()), {1: 64})

    def capture(program: ScriptTarget, plan: Plan | None = None, **more: object) -> Captured:
        value = int(program.argv[-1].rpartition("=")[2])
        return ChainProgram(CARD, weight=(8 if value >= least else 64) * MIB)(program, plan)

    changes, tried = with_options(replace(before, job=replace(before.job, capture=capture)))
    assert [f"{one.option.rpartition(' ')[0]} {one.before} -> {one.after}" for one in changes] == (
        [expected] if expected else []
    )
    assert not tried


def test_values_that_do_not_shard_enough(tmp_path: Path) -> None:
    before = state(script(tmp_path, "", "--tp", "2"), {1: 64})
    changes, tried = with_options(before)
    assert not changes and len(tried) == 1 and tried[0].startswith("--tp 8 is not enough: peak")
    alone = replace(before, job=replace(before.job, ranks=1))
    assert with_options(alone) == ([], [])


def test_a_switch_counts_as_captured(tmp_path: Path) -> None:
    program = script(tmp_path, SWITCHES, "--no-reshard")
    before = state(program, {1: 64})

    @capturing
    def capture(program: ScriptTarget, plan: Plan | None) -> Captured:
        if "--cpu-offload" in program.argv:
            raise not_captured("no offload here")
        weight = 8 if "--reshard" in program.argv else 64
        return ChainProgram(CARD, weight=weight * MIB)(program, plan)

    changes, tried = with_options(replace(before, job=replace(before.job, capture=capture)))
    assert [change.option for change in changes] == ["--reshard"]
    assert changes[0].command[-1] == "--reshard" and changes[0].verified == "captured with it"
    assert tried == ["--cpu-offload could not be captured: no offload here"]


OPTIMIZER = "import torch\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)\n"


def smaller(program: ScriptTarget, card: str, ranks: int = 1) -> tuple[list[Change], list[str]]:
    """Of two weights of 64 MiB with Adam."""
    profile, trace = find_profile(card), training_job()
    captured = Captured(trace, estimate(trace, profile))
    job = Job(program, profile, lambda *_args, **_kwargs: captured, Search(), ranks=ranks)
    base = first_state(job, captured)
    assert not base.fits
    return smaller_states(base, base)


def test_state_of_8_bits_has_its_scales(tmp_path: Path) -> None:
    program = script(tmp_path, OPTIMIZER)
    needs = estimate(training_job(), find_profile("24GiB"))
    card = f"{(needs.high_bytes >> 20) - 100}MiB"
    (small, half), tried = smaller(program, card)
    assert not tried and (small.before, small.after) == (32, 8)
    less = estimate(in_8bit(training_job()), find_profile("24GiB"))
    assert needs.breakdown.optimizer_state == 4 * 64 * MIB
    assert less.breakdown.optimizer_state == 4 * (16 * MIB + MIB // 4), "4 bytes for each 256"
    assert less.breakdown.gradients == needs.breakdown.gradients
    assert half.after == 16 and "bf16_stochastic_round=True" in half.code
    assert small.code == (
        f"{program.name}:2: bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.0001)"
    )
    assert "computed" in small.verified and "captured with" not in small.verified


def test_what_is_not_enough_is_said(tmp_path: Path) -> None:
    changes, tried = smaller(script(tmp_path, OPTIMIZER), "600MiB")
    assert not changes and len(tried) == 2 and "would not be enough: peak" in tried[0]
    assert smaller(script(tmp_path, "optimizer = Muon(weights)\n"), "600MiB") == ([], [])


def test_of_several_ranks_state_that_can_be_sharded(tmp_path: Path) -> None:
    needs = estimate(training_job(), find_profile("24GiB"))
    changes, _ = smaller(script(tmp_path, OPTIMIZER), f"{(needs.high_bytes >> 20) - 100}MiB", 8)
    assert "torchao.optim.AdamW8bit(" in changes[0].code


@pytest.mark.parametrize("part", ["state", "order"])
def test_what_is_not_done_for_such_optimizers_does_not_count(tmp_path: Path, part: str) -> None:
    """A capture with the state on the host, or with early updates, has room that they would not."""
    card = find_profile("800MiB")
    captured = Captured(training_job(), estimate(training_job(), card))
    job = Job(script(tmp_path, OPTIMIZER), card, lambda *_args, **_kwargs: captured, Search())
    plain = first_state(job, captured)
    trace = training_job()
    small = Captured(with_less(trace, trace.storages.role >= 0, 1, 8), captured.estimate)
    lowest = replace(plain, captured=small)
    assert len(smaller_states(plain, lowest)[0]) == 2
    parts = {"state": StatePart(share=1.0), "order": OrderPart(parameters=2, gradient_bytes=1)}
    assert smaller_states(plain, lowest.with_parts(**{part: parts[part]}))[0] == []
