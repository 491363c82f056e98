"""Updates in backward from the first step on: the same bits, plainly, or an error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import Tensor

from memplan.types.errors import OptimizerInBackwardError
from tests.runtime.optimizer_in_backward import (
    refused_loops,
    served_loops,
    test_later,
    test_served,
)
from tests.runtime.optimizer_in_backward.loop import STEPS, Applied, Loop, later, same

SERVED = dict.fromkeys(loop for loop, _ in served_loops.SERVED + test_served.SERVED)
del SERVED[test_served.UnderAMode]  # which state made in backward would not be under
OTHERS = dict.fromkeys(
    itertools.chain(
        refused_loops.REFUSED,
        refused_loops.NOTICED,
        refused_loops.UNDONE,
        map(later, refused_loops.UNDONE),
        (loop for loop, *_ in test_later.NOTICED),
        [test_served.UnderAMode],
    )
)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    return Applied.watching(monkeypatch)


@pytest.mark.parametrize("loop", SERVED, ids=lambda loop: loop.__name__)
def test_the_same_bits(applied: Applied, loop: type[Loop]) -> None:
    found = applied(loop, from_first=True)
    assert same(found.result(), loop().run().result())


@pytest.mark.parametrize("loop", OTHERS, ids=lambda loop: loop.__name__)
def test_never_other_bits(applied: Applied, loop: Any) -> None:
    try:
        plain = loop().run().result()
    except AssertionError:  # it must not come so far
        plain = None
    try:
        found = applied(loop, from_first=True).result()
    except (OptimizerInBackwardError, RuntimeError) as error:
        assert "has already updated" in str(error)
        return
    assert same(found, plain)


def test_no_gradients_are_alive_together_in_any_step(applied: Applied) -> None:
    class Counting(Loop):
        most = 0

        def __init__(self) -> None:
            super().__init__()
            for parameter in self.model.parameters():
                parameter.register_hook(self.count)

        def count(self, _gradient: Tensor) -> None:
            alive = sum(type(p.grad) is Tensor for p in self.model.parameters())
            self.most = max(self.most, alive)

    found = applied(Counting, from_first=True)
    assert applied.early == STEPS * 6 and not applied.notes
    assert found.most <= 1  # type: ignore[attr-defined]
    assert applied(Counting).most > 1  # type: ignore[attr-defined]
