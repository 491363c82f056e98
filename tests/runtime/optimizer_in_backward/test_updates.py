"""The optimizer in backward: the same bits as the plain loop, or no such update, or an error."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from torch import optim

from memplan.runtime.apply import AppliedEverywhere
from memplan.runtime.optimizer_in_backward.preconditions import _first_read
from memplan.types.errors import OptimizerInBackwardError
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from memplan.types.run_outcome import EarlyUpdates
from tests.runtime.optimizer_in_backward.loop import Applied, Loop, later, same
from tests.runtime.optimizer_in_backward.refused_loops import (
    NOTICED,
    REFUSED,
    UNDONE,
    Clipped,
    LoggedAfter,
)
from tests.runtime.optimizer_in_backward.served_loops import SERVED


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    return Applied.watching(monkeypatch)


# Loops that updates in backward serve


@pytest.mark.parametrize("same_job", [True, False])
@pytest.mark.parametrize(("loop", "early"), SERVED, ids=lambda v: getattr(v, "__name__", ""))
def test_the_same_bits(applied: Applied, loop: type[Loop], early: int, same_job: bool) -> None:
    assert same(applied(loop, same_job=same_job).result(), loop().run().result())
    assert (applied.early, applied.notes) == (early, [])


KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "foreach": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.Adam, {"fused": True}),
    (optim.Adam, {"maximize": True, "foreach": True}),
    (optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    (optim.NAdam, {"foreach": True}),
    (optim.RAdam, {}),
    (optim.Adamax, {"foreach": True}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adadelta, {"foreach": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {"foreach": True}),
    (optim.ASGD, {"foreach": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_optimizer(applied: Applied, kind: Any, options: dict[str, Any]) -> None:
    class Own(Loop):
        make = staticmethod(lambda parameters: kind(parameters, **options))

    assert same(applied(Own).result(), Own().run().result())
    assert applied.early == 3 * 6 and not applied.notes


@pytest.mark.parametrize("loop", REFUSED)
def test_where_it_would_change_a_number_nothing_is_early(applied: Applied, loop: Any) -> None:
    found = applied(loop, same_job=False)
    assert same(found.result(), loop().run().result())
    assert applied.early == 0
    (note,) = applied.notes
    assert "weights are updated by the optimizer's step" in note
    assert re.search(loop.says, note), note


@pytest.mark.parametrize("loop", NOTICED)
def test_what_is_noticed_in_time_ends_it(applied: Applied, loop: Any) -> None:
    assert same(applied(loop).result(), loop().run().result())
    assert applied.early == 6 and len(applied.notes) == 1
    assert re.search(loop.says, applied.notes[0]), applied.notes


@pytest.mark.parametrize("loop", UNDONE)
def test_what_cannot_be_undone_is_an_error(applied: Applied, loop: type[Loop]) -> None:
    with pytest.raises((OptimizerInBackwardError, RuntimeError)) as error:
        applied(later(loop))
    assert "has already updated" in str(error.value)


def test_a_first_step_that_reads_gradients_late_is_an_error_too(applied: Applied) -> None:
    """Where the plan's capture has seen no such thing."""
    with pytest.raises(OptimizerInBackwardError):
        applied(LoggedAfter)


def test_fewer_updates_than_planned_are_said(applied: Applied) -> None:
    applied(Loop, 7)
    assert applied.notes and "6 of the 7 parameters" in applied.notes[0]


def test_what_came_of_them_is_told(applied: Applied) -> None:
    applied(Loop, 7)
    assert applied.account == EarlyUpdates(planned=7, parameters=6, steps=3)
    applied(Clipped, 6)
    assert applied.account.steps == 0 and "uses a gradient" in applied.account.ended


def test_an_optimizer_that_is_not_seen_is_said(applied: Applied) -> None:
    class Copied(Loop):
        def zero(self, step: int) -> None:
            super().zero(step)
            if step == 0:
                self.model, self.optimizers = copy.deepcopy((self.model, self.optimizers))

    assert same(applied(Copied).result(), Copied().run().result())
    assert not applied.early
    assert [note for note in applied.notes if "copied or unpickled" in note], applied.notes


def test_together_with_recomputation(applied: Applied) -> None:
    """What backward recomputes it does before the weights that it needs are updated."""
    drop = [OpOutput("aten.gelu.default", 0), OpOutput("aten.addmm.default", 0)]
    part = RecomputePart(groups=[RecomputeGroup("model", drop)])
    said: list[str] = []
    with AppliedEverywhere(part, said.append):
        found = applied(Loop).result()
    assert same(found, Loop().run().result())
    assert (applied.early, applied.notes, said) == (3 * 6, [], [])


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\nif p.grad is not None:\n    p.grad = None\n", 0),
        ("import torch\ntorch.autograd.grad(loss, x)\n", 0),
        ("def log(p):\n    return p.grad.norm()\n", 2),
        ("norm = sum(p.grad.norm() for p in ps if p.grad is not None)\n", 1),
        ("p.grad *= 2\n", 1),
        ("p.grad is None or (\n", 0),
    ],
)
def test_source_that_reads_gradients(tmp_path: Path, source: str, line: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert _first_read(path) == line
