"""The estimate: sums, order of the interval, verdicts and the contents of the peak."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.estimation import estimate
from memplan.estimation.interval import Interval, margin_bytes
from memplan.estimation.width import why_wide
from memplan.simulate import AllocatorSettings, simulate
from memplan.types.device import find_profile
from memplan.types.estimate import Estimate
from memplan.types.trace import Assumption, EventKind, Phase, Provenance, Role, Trace
from tests.estimation.jobs import MIB, Job, training_job

GIB = 1 << 30
CARD = find_profile("rtx4090")
BREAKDOWN_KEYS = [
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "temporaries",
    "inputs",
    "workspaces",
    "fragmentation",
    "communication",
    "engine",
    "context",
    "unknown",
]


def test_every_byte_of_a_known_job() -> None:
    answer = estimate(training_job(), CARD)
    # In the second step weights, gradients and Adam's state live beside the activation and input.
    live = {
        "parameters": 128,
        "gradients": 128,
        "optimizer_state": 256,
        "activations": 32,
        "inputs": 8,
    }
    parts = dict(answer.breakdown.items())
    assert {key: parts[key] // MIB for key in live} == live
    assert parts["temporaries"] == parts["workspaces"] == parts["communication"] == 0
    assert parts["context"] == CARD.context_bytes
    assert answer.breakdown.total() == answer.peak_bytes
    assert answer.requested_peak_bytes == sum(live.values()) * MIB
    assert answer.reserved_peak_bytes == simulate(training_job()).reserved_peak_bytes


def test_where_the_peak_is() -> None:
    answer = estimate(training_job(), CARD)
    assert answer.peak.op == "aten::mm_backward"
    assert answer.peak.module == "model.fc1"
    assert answer.peak.phase == "backward"
    assert answer.peak.step == 1
    assert answer.peak.source == "train.py:12"


def test_where_most_is_allocated() -> None:
    """Not where the reserved memory peaks: the last tensor fits into no segment that is cached."""
    job = Job()
    job.at(Phase.FORWARD, "early", source="train.py:1")
    first, second = job.alloc(64 * MIB), job.alloc(64 * MIB)
    job.free(first)
    job.free(second)
    job.at(Phase.FORWARD, "late", source="train.py:2")
    job.alloc(100 * MIB)
    answer = estimate(job.build(), CARD)
    assert (answer.peak.op, answer.peak.source) == ("late", "train.py:2")
    most = answer.allocated_peak
    assert (most.op, most.source, most.phase, most.event) == ("early", "train.py:1", "forward", 1)


def test_the_largest_tensors() -> None:
    largest = estimate(training_job(), CARD).largest
    held = [t.bytes * t.count for t in largest]
    assert held == sorted(held, reverse=True)
    weight = next(t for t in largest if t.role == "parameter")
    assert (weight.name, weight.count, weight.shape) == ("w0", 1, "4096x4096")
    assert (weight.dtype, weight.source) == ("float32", "train.py:3")
    kept = next(t for t in largest if t.role == "activation")
    assert (kept.bytes, kept.op, kept.module) == (32 * MIB, "aten::mm", "model.fc1")


def test_layers_that_are_alike_are_one_row() -> None:
    """A number that is a level of the path; one inside a name, or another line, is another row."""
    job = Job()
    for layer in range(12):
        job.at(Phase.FORWARD, "aten.mm.default", f"Net.blocks.{layer}.mlp.0", "train.py:3")
        job.alloc(10 * MIB, Role.ACTIVATION, shape="5x512")
    job.at(Phase.FORWARD, "aten.mm.default", "Net.blocks.3.mlp.0", "train.py:4")
    job.alloc(10 * MIB, Role.ACTIVATION, shape="5x512")
    for number in (1, 2):
        job.at(Phase.FORWARD, "aten.mm.default", f"Net.conv{number}", "train.py:3")
        job.alloc(20 * MIB, Role.ACTIVATION)
    job.at(Phase.FORWARD, "aten.mm.default", "Net.head", "train.py:5")
    job.alloc(100 * MIB, Role.ACTIVATION)
    largest = estimate(job.build(), CARD).largest
    assert [(t.count, t.module, t.source) for t in largest] == [
        (12, "Net.blocks.*.mlp.0", "train.py:3"),
        (1, "Net.head", "train.py:5"),
        (1, "Net.conv1", "train.py:3"),
        (1, "Net.conv2", "train.py:3"),
        (1, "Net.blocks.3.mlp.0", "train.py:4"),
    ]


def test_an_observed_job_still_has_an_interval() -> None:
    answer = estimate(training_job(), CARD)
    margin = margin_bytes(answer.reserved_peak_bytes)
    assert answer.reserved_high_bytes == answer.reserved_peak_bytes + margin
    assert answer.reserved_low_bytes == answer.reserved_peak_bytes - margin
    assert answer.high_bytes == answer.reserved_high_bytes + CARD.context_high_bytes
    assert answer.low_bytes == answer.reserved_low_bytes + CARD.context_low_bytes


def test_sizes_derived_by_rule_widen_the_interval() -> None:
    sure = estimate(training_job(workspace=(96 * MIB, 96 * MIB, 96 * MIB)), CARD)
    wide = estimate(training_job(workspace=(0, 96 * MIB, 512 * MIB)), CARD)
    within = sure.allocated_peak_bytes - 48 * MIB
    assert within <= wide.allocated_peak_bytes <= sure.allocated_peak_bytes
    assert wide.high_bytes > sure.high_bytes + 300 * MIB
    assert wide.low_bytes < sure.low_bytes - 50 * MIB
    assert 0 < wide.breakdown.workspaces <= 96 * MIB


def test_the_expected_peak_has_the_middle_one_of_the_fragmentations() -> None:
    """Beside the workspace in its segment there is no room where it is at its largest only."""
    job = Job()
    job.at(Phase.FORWARD, "aten::convolution", "Net.conv")
    hole = job.alloc(200 * MIB)
    job.free(hole)
    workspace = job.alloc(150 * MIB, Role.WORKSPACE, low=0, high=150 * MIB)
    job.alloc(60 * MIB, Role.ACTIVATION)
    job.free(workspace)
    answer = estimate(job.build(), CARD)
    assert answer.allocated_peak_bytes == answer.reserved_peak_bytes == 210 * MIB
    assert answer.reserved_high_bytes >= 260 * MIB


def test_late_reuse_counts_towards_the_high_bound_only() -> None:
    job = Job()
    job.at(Phase.FORWARD, "aten::copy_")
    for _ in range(4):
        storage = job.alloc(256 * MIB)
        job.builder.append(EventKind.RECORD_STREAM, storage, stream=7)
        job.free(storage)
    answer = estimate(job.build(), CARD)
    assert answer.reserved_peak_bytes == 256 * MIB
    assert answer.reserved_high_bytes >= 4 * 256 * MIB


def test_fits_with_room_to_spare() -> None:
    answer = estimate(training_job(), CARD)
    assert answer.fits is True
    assert answer.spare_bytes == CARD.total_memory_bytes - answer.peak_bytes
    assert answer.missing_bytes is None
    assert answer.gpu is not None and answer.gpu.name == "rtx4090"


@pytest.mark.parametrize("size", ["600MiB", "1000MiB", "1200MiB", "1400MiB", "2GiB"])
def test_fits_is_what_the_high_bound_says(size: str) -> None:
    card = find_profile(size)
    answer = estimate(training_job(), card)
    assert answer.fits is (answer.high_bytes <= card.total_memory_bytes)
    assert (answer.spare_bytes is None) is not answer.fits
    if not answer.fits:
        assert answer.missing_bytes == answer.high_bytes - card.total_memory_bytes


def test_without_a_card_there_is_no_verdict() -> None:
    answer = estimate(training_job())
    assert answer.fits is None and answer.gpu is None
    assert answer.spare_bytes is None and answer.missing_bytes is None
    assert answer.breakdown.context == find_profile("a100-80gb").context_bytes
    assert any("no verdict" in note for note in answer.notes)


def cached_job() -> Trace:
    """Frees 1 GiB in pieces of 64 MiB, then needs 1 GiB in one: nothing cached can serve it."""
    job = Job()
    job.at(Phase.FORWARD, "aten::empty")
    for storage in [job.alloc(64 * MIB) for _ in range(16)]:
        job.free(storage)
    job.free(job.alloc(GIB))
    return job.build()


def test_a_card_on_which_caches_must_go() -> None:
    roomy = estimate(cached_job(), CARD)
    assert roomy.fits and roomy.reserved_peak_bytes == 2 * GIB
    tight = estimate(cached_job(), find_profile("2GiB"))
    assert tight.fits and tight.reserved_peak_bytes == GIB
    assert tight.num_alloc_retries == 1
    assert any("the card fills up" in note for note in tight.notes)
    assert tight.breakdown.total() == tight.peak_bytes


def test_a_workspace_that_cannot_be_had_is_not_counted() -> None:
    job = Job()
    job.at(Phase.FORWARD, "aten::convolution")
    kept = job.alloc(256 * MIB)
    job.free(job.alloc(GIB, Role.WORKSPACE, low=MIB, high=GIB))
    job.free(kept)
    trace = job.build()
    roomy, tight = estimate(trace, CARD), estimate(trace, find_profile("1500MiB"))
    assert roomy.breakdown.workspaces == GIB
    assert tight.fits and tight.breakdown.workspaces < 900 * MIB
    assert tight.breakdown.total() == tight.peak_bytes
    assert any("smaller workspaces" in note for note in tight.notes)


def test_a_card_smaller_than_its_context_fits_nothing() -> None:
    answer = estimate(Job().build(), find_profile("200MiB"))
    assert answer.fits is False
    assert answer.low_bytes <= answer.peak_bytes <= answer.high_bytes


def test_a_job_that_does_not_fit_says_what_it_would_need() -> None:
    answer = estimate(cached_job(), find_profile("1GiB"))
    assert answer.fits is False
    assert answer.reserved_peak_bytes == 2 * GIB
    assert not any("cached" in note for note in answer.notes)


def test_the_memory_fraction_counts_as_the_card() -> None:
    settings_ = AllocatorSettings.parse("per_process_memory_fraction:0.02")
    answer = estimate(training_job(), CARD, settings_)
    assert answer.fits is False and answer.missing_bytes
    assert estimate(training_job(), CARD).fits is True


def test_settings_come_from_the_trace() -> None:
    trace = training_job()
    plain = estimate(trace, CARD)
    trace = training_job()
    conf = "large_segment_size_mb:512"
    object.__setattr__(trace, "meta", msgspec.structs.replace(trace.meta, alloc_conf=conf))
    changed = estimate(trace, CARD)
    assert changed.alloc_conf == conf
    assert changed.reserved_peak_bytes >= plain.reserved_peak_bytes


def test_an_empty_trace() -> None:
    answer = estimate(Job().build(), CARD)
    assert answer.reserved_peak_bytes == 0
    assert (
        answer.peak.event == answer.allocated_peak.event == -1
        and answer.largest == []
        and answer.curve.events == []
    )
    assert answer.breakdown.total() == answer.peak_bytes == CARD.context_bytes


def test_a_forward_that_no_backward_follows_keeps_nothing() -> None:
    job = Job()
    job.at(Phase.FORWARD, "aten::mm")
    first = job.alloc(4 * MIB)
    job.at(Phase.BACKWARD, "aten::mm")
    job.alloc(2 * MIB, Role.GRADIENT)
    job.free(first)
    job.at(Phase.FORWARD, "aten::mm", step=1)
    job.alloc(64 * MIB)
    answer = estimate(job.build(), CARD)
    assert answer.breakdown.temporaries == 64 * MIB
    assert answer.breakdown.activations == 0


def test_code_without_modules_keeps_for_backward_what_lives_through_one() -> None:
    job = Job()
    job.at(Phase.SETUP, "aten::ones")
    job.alloc(16 * MIB)  # a constant of the script
    job.at(Phase.SETUP, "aten::mm")
    variable: list[int] = []
    for step in (0, 1):
        job.at(Phase.OTHER if step else Phase.SETUP, "aten::mm", step=step)
        saved, anew = job.alloc(4 * MIB), job.alloc(2 * MIB)
        for old in variable:
            job.free(old)
        variable = [anew]
        job.at(Phase.BACKWARD, "aten::mm", step=step)
        scratch = job.alloc(64 * MIB)
        job.free(saved)
        job.free(scratch)
    job.at(Phase.OTHER, "aten::mm", step=2)
    job.free(variable[0])
    breakdown = estimate(job.build(), CARD).breakdown
    assert breakdown.activations == 6 * MIB
    assert breakdown.temporaries == (64 + 16) * MIB


def test_json_holds_the_contract() -> None:
    answer = msgspec.json.decode(msgspec.json.encode(estimate(training_job(), CARD)))
    for key in ("schema_version", "memplan_version", "torch_version", "gpu", "fits"):
        assert answer[key] not in (None, "")
    assert list(answer["breakdown"]) == BREAKDOWN_KEYS
    assert sum(answer["breakdown"].values()) == answer["peak_bytes"]
    assert answer["assumptions"][0]["kind"] == "routing"
    assert answer["kernels"][0]["kernel"] == "flash"
    assert answer["steps"] == 2 and answer["stop_reason"] == "the step repeats"
    back = msgspec.convert(answer, Estimate)
    assert back == estimate(training_job(), CARD)


def test_the_curve_keeps_the_peaks() -> None:
    job = Job()
    job.at(Phase.FORWARD, "aten::mm")
    for index in range(2000):
        job.free(job.alloc(700 * MIB if index == 1234 else 4 * MIB))
    answer = estimate(job.build(), CARD)
    assert len(answer.curve.events) == 200
    assert max(answer.curve.allocated_bytes) == answer.allocated_peak_bytes
    assert max(answer.curve.reserved_bytes) == answer.reserved_peak_bytes


@st.composite
def random_jobs(draw: st.DrawFn) -> Trace:
    """Any order of allocations and releases, roles, phases and uncertain sizes."""
    job = Job()
    live: list[int] = []
    for _ in range(draw(st.integers(0, 40))):
        if draw(st.booleans()) and live:
            job.free(live.pop(draw(st.integers(0, len(live) - 1))))
            continue
        job.at(draw(st.sampled_from(list(Phase))), "aten::op")
        size = draw(st.integers(0, 80 * MIB))
        low = draw(st.integers(0, size))
        high = size + draw(st.integers(0, 80 * MIB))
        storage = job.alloc(size, draw(st.sampled_from(list(Role))), low=low, high=high)
        if draw(st.booleans()):
            job.builder.append(EventKind.RECORD_STREAM, storage, stream=1)
        live.append(storage)
    return job.build()


@settings(max_examples=60, deadline=None)
@given(random_jobs(), st.none() | st.integers(200 * MIB, 4 * GIB))
def test_sums_order_and_verdict_hold_for_any_job(trace: Trace, card_bytes: int | None) -> None:
    card = None if card_bytes is None else find_profile(str(card_bytes))
    answer = estimate(trace, card)
    assert answer.breakdown.total() == answer.peak_bytes
    assert all(nbytes >= 0 for _, nbytes in answer.breakdown.items())
    assert answer.low_bytes <= answer.peak_bytes <= answer.high_bytes
    assert 0 <= answer.reserved_low_bytes <= answer.reserved_peak_bytes
    assert answer.reserved_peak_bytes <= answer.reserved_high_bytes
    assert answer.allocated_low_bytes <= answer.allocated_peak_bytes
    assert answer.allocated_peak_bytes <= answer.allocated_high_bytes
    assert answer.requested_peak_bytes <= answer.allocated_peak_bytes <= answer.reserved_peak_bytes
    assert answer.allocated_high_bytes <= answer.reserved_high_bytes
    if card is None:
        assert answer.fits is None
    else:
        assert answer.fits is (answer.high_bytes <= card.total_memory_bytes)
    assert sum(t.bytes * t.count for t in answer.largest) <= answer.reserved_peak_bytes


def test_a_capture_on_cpu_kernels_has_a_wider_interval() -> None:
    job = training_job()
    job.meta.method = "fake-cpu"
    fallback, sure = estimate(job, CARD), estimate(training_job(), CARD)
    assert fallback.reserved_peak_bytes == sure.reserved_peak_bytes
    assert fallback.high_bytes > sure.high_bytes
    assert fallback.low_bytes < sure.low_bytes


# Why an interval is wide


@pytest.mark.parametrize(
    ("op", "workspace", "why"),
    [
        (
            "aten.convolution.default",
            (0, 200 * MIB, 600 * MIB),
            "cuDNN chooses its convolution workspaces when it runs: the largest takes between "
            "nothing and 600 MiB.",
        ),
        (
            "aten._cudnn_rnn_backward.default",
            (300 * MIB, 600 * MIB, 1536 * MIB),
            "cuDNN does not publish what its recurrent layers keep: the largest takes between "
            "300 MiB and 1.5 GiB.",
        ),
        (
            "aten.mm.default",
            (100 * MIB, 300 * MIB, 400 * MIB),
            "kernels take scratch memory whose size is not published: the largest takes between "
            "100 MiB and 400 MiB.",
        ),
    ],
)
def test_a_wide_interval_is_explained(op: str, workspace: tuple[int, int, int], why: str) -> None:
    answer = estimate(training_job(workspace=workspace, op=op), find_profile("a100-80gb"))
    assert [note for note in answer.notes if "wide" in note] == [f"The range is wide because {why}"]


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("shape", "train.py:10", "sizes depend on values of data (a mask takes half, train.py:10)"),
        ("shape", "train.py:11", "sizes depend on values of data"),
        (
            "compile",
            "net.py:7",
            "a graph that could not be compiled here was captured as eager (a mask takes half, "
            "net.py:7)",
        ),
    ],
)
def test_an_assumed_size_is_explained_by_what_was_assumed(kind: str, source: str, why: str) -> None:
    trace = training_job(workspace=(100 * MIB, 300 * MIB, 400 * MIB))
    events, said = trace.events, Assumption(kind, "a mask takes half", source=source)
    by_rule = events.provenance == Provenance.RULE
    events.provenance[by_rule] = Provenance.ASSUMED
    meta = msgspec.structs.replace(trace.meta, assumptions=[said])
    [note] = [n for n in estimate(replace(trace, meta=meta)).notes if "wide" in n]
    assert note.startswith(f"The range is wide because {why}: the largest takes between 100 MiB")


def test_what_is_uncertain_by_a_little_explains_no_wide_interval() -> None:
    wide = cast(Interval, SimpleNamespace(reserved=(512 * MIB, 1024 * MIB, 1536 * MIB)))
    sizes = [(0, 4096, 8192), (0, 4096, 2 * MIB)]
    found = [why_wide(training_job(workspace=one, op="aten.mm.default"), wide) for one in sizes]
    assert found[0] == [] and "between nothing and 2 MiB" in found[1][0]


def test_a_narrow_interval_needs_no_explanation() -> None:
    sure = training_job(workspace=(16 * MIB, 16 * MIB, 16 * MIB), op="aten.convolution.default")
    nearly = training_job(workspace=(15 * MIB, 16 * MIB, 17 * MIB), op="aten.convolution.default")
    for trace in (training_job(), sure, nearly):
        assert not any("wide" in note for note in estimate(trace).notes)


def test_a_size_says_whose_times_it_has() -> None:
    notes = [estimate(training_job(), find_profile(card)).notes for card in ("24GiB", "rtx4090")]
    said = [
        [note for note in of_card if "times are those of a100-40gb" in note] for of_card in notes
    ]
    assert list(map(len, said)) == [1, 0]
