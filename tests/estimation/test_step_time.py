"""The step's time in an estimate, and the line that says it."""

from __future__ import annotations

import msgspec
import pytest

from memplan.estimation import estimate
from memplan.report.text import step_line
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile
from memplan.types.estimate import Estimate
from memplan.types.trace import EventKind, Phase, TraceMeta

CARD = find_profile("h100")


def estimated(steps: int = 3, card: bool = True) -> Estimate:
    """Of a job whose step is one product."""
    builder = TraceBuilder()
    storage = builder.new_storage(dtype="bfloat16")
    builder.append(EventKind.ALLOC, storage, 1 << 20)
    for step in range(3):
        builder.step, builder.phase = step, Phase.FORWARD
        builder.begin_op("aten.mm.default")
        text = "8192x8192:bfloat16:c 8192x8192:bfloat16:c"
        builder.op_work(flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2, operands=text)
    meta = TraceMeta(gpu="h100", optimizer_steps=steps, steady_steps=[1, 2] if steps else [])
    return estimate(builder.build(meta), CARD if card else None)


def test_an_estimate_has_the_time_of_a_step_and_json_takes_it() -> None:
    found = estimated()
    assert found.step_seconds is not None and found.step_low_seconds is not None
    assert found.step_low_seconds < found.step_seconds < (found.step_high_seconds or 0)
    assert list(found.kernel_seconds) == ["matrix products"]
    told = msgspec.json.decode(msgspec.json.encode(found))
    assert told["step_seconds"] == pytest.approx(found.step_seconds)
    assert told["exposed_communication_seconds"] is None


@pytest.mark.parametrize(("steps", "card"), [(0, True), (3, False)])
def test_nothing_is_said_without_a_step_or_a_card(steps: int, card: bool) -> None:
    found = estimated(steps, card)
    assert found.step_seconds is None and found.kernel_seconds == {}
    assert step_line(found) == ""


def test_the_line_says_what_is_known() -> None:
    found = msgspec.structs.replace(
        estimated(),
        step_seconds=0.412,
        step_low_seconds=0.36,
        step_high_seconds=0.48,
        host_launch_seconds=0.02,
        model_flops_utilisation=0.61,
        exposed_communication_seconds=0.038,
    )
    said = "step 412 ms (360–480), 61 % of bf16 peak; exposed communication 38 ms"
    assert step_line(found) == said
    for late, how in ((0.0, "hidden"), (0.004, "exposed"), (0.001, "1 ms of it exposed")):
        fed = msgspec.structs.replace(found, input_seconds=0.004, exposed_input_seconds=late)
        assert step_line(fed) == f"{said}; input 4 ms on the capturing CPU, {how}"
    little = msgspec.structs.replace(found, input_seconds=0.002, exposed_input_seconds=0.002)
    assert step_line(little) == said
    bound = msgspec.structs.replace(found, host_launch_seconds=0.41)
    assert step_line(bound) == said + "; bound by the host's launches"
    long = msgspec.structs.replace(
        found,
        step_seconds=2.538,
        step_low_seconds=2.2,
        step_high_seconds=3.214,
        model_flops_utilisation=None,
        exposed_communication_seconds=None,
    )
    assert step_line(long) == "step 2.54 s (2.2–3.21)"
