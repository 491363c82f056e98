"""Which card, slice and host a job is placed on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memplan.placement.answer import Placement
from memplan.placement.mig import slices_of
from memplan.placement.place import Demand, demand_of_answer, demand_of_trace, place
from memplan.types.device import find_profile, known_profiles
from memplan.types.errors import FormatError, UsageError
from memplan.types.estimate import Estimate
from memplan.types.trace import HostCapture
from tests.placement.answers import GIB, answer_of, trace_of


def _placed(answer: Estimate, **asked: Any) -> Placement:
    return place(demand_of_answer(msgspec.json.encode(answer)), **asked)


def test_the_smallest_card_of_the_same_kernels_holds_the_high_bound() -> None:
    small = _placed(answer_of("a100-80gb", 30 * GIB))
    assert small.card is not None and small.card.card == "a100-40gb"
    assert small.mig is not None and small.mig.mig == "3g.40gb" and small.mig.card == "a100-80gb"
    assert any("kernels may take other workspaces" in note for note in small.notes)
    assert "compute capability 8.0 alone were looked at" in small.notes[0]
    large = _placed(answer_of("a100-80gb", 40 * GIB))
    assert large.card is not None and large.card.card == "a100-80gb" and large.mig is None


def test_no_card_holds_it() -> None:
    found = _placed(answer_of("a100-80gb", 90 * GIB))
    assert not found.fits and found.card is None and found.mig is None


def test_a_named_card_and_no_other() -> None:
    answer = answer_of("a100-80gb", 12 * GIB)
    named = _placed(answer, named=find_profile("a100-80gb"))
    assert named.card is not None and named.card.card == "a100-80gb"
    assert not any("looked at" in note for note in named.notes)
    assert named.mig is not None and named.mig.card == "a100-80gb" and named.mig.mig == "1g.20gb"
    with pytest.raises(UsageError, match=r"compute capability 8.0; h100 has 9.0"):
        _placed(answer, named=find_profile("h100"))


def test_the_context_of_a_card_with_a_larger_one_is_added() -> None:
    seen, other = find_profile("24GiB:sm80"), find_profile("a100-40gb")
    smaller = msgspec.structs.replace(seen, context_high_bytes=other.context_high_bytes - GIB)
    answer = answer_of("24GiB:sm80", 20 * GIB)
    demand = demand_of_answer(msgspec.json.encode(answer))
    assert demand.on(smaller)[0] == 20 * GIB  # never less than what was said
    larger = msgspec.structs.replace(seen, context_high_bytes=seen.context_high_bytes + GIB)
    assert demand.on(larger)[0] == 21 * GIB


def test_the_verdict_on_the_captured_card_is_that_of_the_capture() -> None:
    """By a replay that gave cached memory back: more would be asked for than the card has."""
    card = find_profile("h200")
    answer = answer_of("h200", card.total_memory_bytes + GIB, fits=True)
    assert _placed(answer).card is not None


def test_a_job_of_many_ranks_is_asked_for_by_nodes_and_gets_no_slice() -> None:
    found = _placed(answer_of("h100", 8 * GIB, world_size=16, host_processes=8, host=30 * GIB))
    assert (found.nodes, found.gpus_per_node, found.gpus) == (2, 8, 16)
    assert found.mig is None and found.host_bytes_per_node == 30 * GIB


def test_processes_that_share_a_gpu_are_counted_together() -> None:
    answer = answer_of("a100-80gb", 6 * GIB, world_size=8, host_processes=8, card_processes=8)
    found = _placed(answer)
    assert found.gpus == 1 and found.card is not None and found.card.card == "a100-80gb"
    assert found.card.needed_bytes >= 48 * GIB


def test_processes_that_the_answer_does_not_say() -> None:
    answer = answer_of("h100", 8 * GIB)
    found = _placed(answer, world=16, per_node=8)
    assert (found.nodes, found.gpus_per_node) == (2, 8)
    with pytest.raises(UsageError, match="do not divide"):
        _placed(answer, world=9, per_node=8)
    known = answer_of("h100", 8 * GIB, world_size=16, host_processes=8)
    with pytest.raises(UsageError, match="--world-size 8, but the answer is of 16"):
        _placed(known, world=8)


def test_a_plan_that_fits_is_placed_with_the_plan() -> None:
    before, after = answer_of("h100", 90 * GIB), answer_of("h100", 70 * GIB)
    fit = {"fits": True, "before": before, "after": after, "plan": "job.plan"}
    demand = demand_of_answer(msgspec.json.encode(fit))
    assert demand.estimate == after
    assert "memplan run --plan job.plan" in place(demand).notes[0]
    none = {"fits": False, "before": before, "after": after}
    demand = demand_of_answer(msgspec.json.encode(none))
    assert demand.estimate == before and not demand.notes


def test_a_trace_is_replayed_for_each_card() -> None:
    demand: Demand = demand_of_trace(trace_of("a100-80gb"))
    found = place(demand)
    assert found.card is not None and found.card.card == "a100-40gb"
    assert found.mig is not None and found.mig.mig == "1g.5gb"
    assert found.host_bytes_per_node is None
    assert any("host RAM is not asked for" in note for note in found.notes)


@pytest.mark.parametrize("text", [b"", b"{", b'{"schema_version": 1}', b'{"fits": true}', b"\xff"])
def test_what_is_no_answer(text: bytes) -> None:
    with pytest.raises(FormatError, match="neither a trace nor an answer"):
        demand_of_answer(text)


def test_an_answer_of_a_later_release() -> None:
    answer = answer_of("h100", GIB, schema_version=99)
    with pytest.raises(FormatError, match="version 99; this memplan reads 1"):
        demand_of_answer(msgspec.json.encode(answer))


@pytest.mark.parametrize("field", ["host_processes", "card_processes", "world_size", "high_bytes"])
def test_figures_that_no_job_has(field: str) -> None:
    fields = {field: -1 if field == "high_bytes" else 0}
    answer = msgspec.structs.replace(answer_of("h100", GIB), **fields)
    with pytest.raises(FormatError, match="figures that no job has"):
        demand_of_answer(msgspec.json.encode(answer))


def test_a_trace_of_one_rank_of_several_says_so() -> None:
    trace = trace_of("h100")
    assert not demand_of_trace(trace).notes
    trace.meta.host = HostCapture(local_processes=2)
    assert demand_of_trace(trace).notes[0].startswith("a trace is of one rank, and others may")


def test_an_answer_without_an_estimate_says_why() -> None:
    text = (
        b'{"status": "impossible", "fits": false, "before": null, "after": null, "reason": "odd"}'
    )
    with pytest.raises(FormatError, match="an answer without an estimate: odd"):
        demand_of_answer(text)


@pytest.mark.parametrize(
    ("world", "local", "sharing", "hint"),
    [
        (12, 8, 1, "--gpus-per-node 6 or another --world-size"),
        (8, 8, 3, "another --world-size"),
        (12, 7, 2, "--gpus-per-node 6 or another --world-size"),
    ],
)
def test_nodes_that_are_advised_would_do(world: int, local: int, sharing: int, hint: str) -> None:
    answer = answer_of("h100", GIB, card_processes=sharing, host_processes=sharing)
    with pytest.raises(UsageError) as caught:
        _placed(answer, world=world, per_node=local)
    assert caught.value.hint == hint


def test_slices_are_smaller_than_their_card_and_named_by_their_memory() -> None:
    found = {card.name: slices_of(card) for card in known_profiles()}
    assert {name for name, slices in found.items() if slices} == {
        *("a100-40gb", "a100-80gb", "h100", "h200")
    }
    for card in known_profiles():
        for name, part in found[card.name].items():
            gigabytes = int(name.partition("g.")[2].removesuffix("gb"))
            assert part.total_memory_bytes < card.total_memory_bytes
            assert 0.85 < part.total_memory_bytes / (gigabytes * GIB) <= 1
            assert "nvidia-smi mig -lgip" in part.sources["total_memory"]
