"""A real run beside the estimate: histories made by hand stand for the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memplan.estimation import estimate
from memplan.estimation.verify import verify
from memplan.report.verification import verification_lines
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile, known_profiles
from memplan.types.device_corrections import (
    context_of,
    corrections_path,
    read_corrections,
    save_context,
)
from memplan.types.errors import FormatError
from memplan.types.trace import EventKind, Phase, Provenance, Trace, TraceMeta
from memplan.types.verification import Verification

MIB = 1 << 20
CARD = find_profile("24GiB")


def job(sizes: list[int], steps: int = 3, *, source: str = "train.py:7") -> Trace:
    """Parameters of 64 MiB, then steps that ask for `sizes` MiB in turn and release them."""
    builder = TraceBuilder()
    builder.append(EventKind.ALLOC, builder.new_storage(), 64 * MIB)
    for step in range(steps):
        builder.step = step
        held = []
        for index, size in enumerate(sizes):
            builder.phase = Phase.FORWARD if index == 0 else Phase.OPTIMIZER
            builder.source = builder.intern(f"{source}{index}")
            builder.begin_op("aten.mm.default")
            held.append((builder.new_storage(), size * MIB))
            provenance = Provenance.RULE if size == 5 else Provenance.OBSERVED
            builder.append(EventKind.ALLOC, *held[-1], provenance=provenance)
        for storage, nbytes in held:
            builder.append(EventKind.FREE, storage, nbytes)
    return builder.build(TraceMeta(optimizer_steps=steps))


def measured(allocated: int, reserved: int, process: int | None = None) -> dict[str, Any]:
    found = {"max_memory_allocated": allocated * MIB, "max_memory_reserved": reserved * MIB}
    if process is not None:
        found["nvml_peak_bytes"] = process * MIB
    return {**found, "device_name": "NVIDIA L4", "torch": "2.13.0", "error": ""}


def verified(real: Trace, foreseen: Trace, figures: dict[str, Any]) -> Verification:
    return verify(real, foreseen, estimate(foreseen, CARD), figures)


def text(answer: Verification) -> str:
    return "\n".join(line.plain for line in verification_lines(answer))


def test_a_run_as_foreseen() -> None:
    trace = job([20, 30])
    answer = verified(trace, trace, measured(114, 116, 616))
    assert answer.holds and answer.first is None and answer.steady is None
    assert answer.steady_compared and not answer.surplus
    assert answer.outside_bytes == 500 * MIB
    assert [one.name for one in answer.peaks] == ["allocated", "reserved", "process"]
    assert all(one.held for one in answer.peaks)
    assert text(answer).startswith("the estimate holds")
    assert "every request of the run was foreseen, in order" in text(answer)


def test_the_first_request_that_differs() -> None:
    """The run asks for 24 MiB where 20 were foreseen: request 1 of each step, 2 of the run."""
    answer = verified(job([24, 30], source="real.py:"), job([20, 30]), measured(118, 120))
    assert answer.first is not None and answer.steady is not None
    assert (answer.first.index, answer.first.bytes) == (1, 4 * MIB)
    assert answer.first.real is not None and answer.first.foreseen is not None
    assert answer.first.real.source == "real.py:0" and answer.first.real.step == 0
    assert answer.first.foreseen.source == "train.py:70"
    assert answer.steady.index == 0
    assert [(one.bytes, one.times) for one in answer.surplus] == [
        (24 * MIB, 3),
        (20 * MIB, -3),
    ]
    assert answer.surplus[0].places == ["aten.mm.default real.py:0"]
    shown = text(answer)
    assert "the runs part after 1 requests, by +4 MiB" in shown
    assert "3 fewer of     20 MiB  aten.mm.default train.py:70" in shown


def test_a_rule_is_named() -> None:
    answer = verified(job([20, 4]), job([20, 5]), measured(89, 90))
    assert answer.first is not None and answer.first.foreseen is not None
    assert answer.first.foreseen.provenance == "rule" and answer.first.bytes == -MIB
    assert "(rule)" in text(answer)


def test_another_number_of_steps_is_no_divergence() -> None:
    answer = verified(job([20, 30], steps=5), job([20, 30], steps=3), measured(114, 116))
    assert answer.first is None and answer.steady is None
    assert "the run made 5 optimizer steps, the capture 3" in answer.notes[0]


def test_peaks_beyond_the_interval() -> None:
    trace = job([20, 30])
    answer = verified(trace, trace, measured(114, 4000))
    assert not answer.holds
    assert [one.held for one in answer.peaks] == [True, False]
    assert text(answer).startswith("above the estimate: reserved")
    assert any("NVML did not answer" in note for note in answer.notes)


# The corrections of a card


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known_profiles.cache_clear()
    return tmp_path / "memplan" / "devices.toml"


def test_a_correction_is_used_and_named(config: Path) -> None:
    before = next(p for p in known_profiles() if p.name == "l4")
    assert context_of(300) == (280, 300, 330)
    save_context(before.device_name, context_of(300), 'by "hand"')
    other = next(p for p in known_profiles() if p.name == "t4").device_name
    path = save_context(other, (1, 2, 3), "twice")
    assert path == corrections_path() == config and len(read_corrections()) == 2
    known_profiles.cache_clear()
    after = next(p for p in known_profiles() if p.name == "l4")
    known_profiles.cache_clear()
    assert (after.context_low_bytes, after.context_bytes) == (280 * MIB, 300 * MIB)
    assert after.context_high_bytes == 330 * MIB
    assert after.sources["context"] == 'by "hand"'
    assert after.total_memory_bytes == before.total_memory_bytes


@pytest.mark.parametrize(
    "content",
    [
        "devices = 3",
        "[devices.x]\ncontext_mib = [3, 2, 1]\nmeasured = ''",
        "[devices.x]\ncontext_mib = [1, 2]\nmeasured = ''",
        "[devices.x]\ncontext_mib = [1, 2, 3]\nmeasured = ''\nother = 1",
        "not toml",
    ],
)
def test_a_damaged_file_of_corrections(config: Path, content: str) -> None:
    config.parent.mkdir()
    config.write_text(content)
    with pytest.raises(FormatError, match=r"devices\.toml: "):
        read_corrections()
