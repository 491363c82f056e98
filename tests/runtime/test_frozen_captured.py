"""What a capture with frozen weights on the host shows: the card's memory without them, the host's
with them, to the byte; and with recomputation on top, what the planner foretold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from memplan.phases import plain_peak, step_graph
from memplan.recompute.evaluate import Evaluator
from memplan.recompute.selection import Selection, to_part
from memplan.runtime.apply import AppliedEverywhere
from memplan.runtime.frozen import FrozenWeights, in_effect
from memplan.runtime.tape import Recording
from memplan.types.op_names import FETCH
from memplan.types.plan import FrozenPart, RecomputePart
from memplan.types.trace import PAGE_LOCKED, HostEventKind, Trace
from tests.capturing.jobs import record
from tests.runtime import test_frozen
from tests.runtime.harness import Spy

WIDTH, LAYERS, ROWS = 512, 6, 64
WEIGHT = 4 * WIDTH * WIDTH


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def job(rows: int = ROWS, *, late: bool = False) -> Callable[[], None]:
    """`late`: weights are frozen on the card."""

    def run() -> None:
        model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
        model = model.cuda() if late else model
        for layer in model:
            layer.get_submodule("base").requires_grad_(False)
        model.cuda()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
        for _ in range(4):
            model(torch.randn(rows, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def planned(
    run: Callable[[], None], part: FrozenPart, recompute: RecomputePart | None = None
) -> Trace:
    notes: list[str] = []

    def applied() -> None:
        with AppliedEverywhere(recompute, notes.append), FrozenWeights(part, notes.append):
            run()

    trace = record(applied)
    assert not notes
    return trace


def peak(trace: Trace) -> int:
    return plain_peak(step_graph(trace))


def locked(trace: Trace) -> int:
    host = trace.host
    made = (host.kind == HostEventKind.ALLOC) & (host.pinned == PAGE_LOCKED)
    return int(host.bytes[made].sum())


@pytest.mark.parametrize(("share", "away"), [(0.5, 3), (1.0, 6)])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_weights_are_on_the_host_and_not_on_the_card(share: float, away: int, ahead: int) -> None:
    plain = record(job())
    trace = planned(job(), FrozenPart(share=share, ahead_bytes=ahead * WEIGHT))
    assert locked(trace) == away * WEIGHT
    # The peak is where the last weight is used first by backward.
    assert peak(trace) <= peak(plain) - (away - 1 - ahead) * WEIGHT
    whole = sum(nbytes for nbytes in trace.events.bytes[trace.events.bytes >= WEIGHT].tolist())
    assert whole >= 4 * 2 * away * WEIGHT


@pytest.mark.parametrize(("ahead", "late"), [(0, False), (1, True), (2, False)])
def test_recomputation_on_top_keeps_what_was_planned(ahead: int, late: bool) -> None:
    part = FrozenPart(share=1.0, ahead_bytes=ahead * WEIGHT)
    base = planned(job(2048, late=late), part)
    graph = step_graph(base)
    droppable = np.flatnonzero(graph.values.droppable).tolist()
    assert droppable
    evaluator = Evaluator(graph)
    for groups in (
        tuple(frozenset({value}) for value in droppable),
        (frozenset(droppable),),
        (frozenset(droppable[: len(droppable) // 2]), frozenset(droppable[len(droppable) // 2 :])),
    ):
        selection = Selection(groups)
        foretold = evaluator.evaluate(selection).peak_bytes
        recompute = to_part(graph, selection, budget_bytes=0, peak_bytes=0, added_seconds=0.0)
        found = peak(planned(job(2048, late=late), part, recompute))
        assert 0.98 * foretold <= found <= 1.02 * foretold, len(groups)


def test_what_the_lever_does_is_no_op_of_a_recorded_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_effect, "SMALLEST", 500)
    spies = Spy(), Spy()
    model = test_frozen.made("adapted")
    with Recording(spies[0]):
        model(torch.ones(2, test_frozen.WIDTH))
    with test_frozen.applied() as (lever, _), Recording(spies[1]):
        model(torch.ones(2, test_frozen.WIDTH))
        assert len(list(lever.weights())) == 4
    assert [op for op in spies[1].ops if op[0] != FETCH] == spies[0].ops
