"""Answers to questions about device values that cannot be known in a capture.

Each answer depends on how the value was computed, is recorded as an assumption, and is bounded: a
script that loops until an unknown value changes gets the other answer after a while, and an error
if that does not help.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memplan.capturing.known_values.asking import asking
from memplan.types.errors import CaptureError
from memplan.types.trace import Assumption

_TRUE_ORIGINS = frozenset({"all", "isclose", "equal", "_is_all_true"})
_HEALTH = frozenset({"isnan", "isinf", "_is_all_true"})
"""A loop on one of these waits for a failure or for its own end; it is no training loop."""
_ROUNDS = 16
"""Turns of a loop outside the model before an optimizer step: enough to accumulate gradients."""
_ROUNDS_IN_MODEL = 4
"""Turns of a loop inside a model, which may keep all of them for the backward pass. An adaptive
solver of a neural ODE takes about as many steps (torchdiffeq's for MNIST: 20 to 26 evaluations,
six in each step)."""
_FEWEST_ROUNDS = 1
"""Turns of a loop inside another loop: `_FEW_LOOPS` loops on its line have ended since the
optimizer stepped, as a solver's between the times that are asked for."""
_FEW_LOOPS = 16
_ALIKE = 128
"""Turns that ask for the same memory after which a loop that may break does: more than those after
which a solver usually starts anew. After the first time on its line, `_ROUNDS` suffice."""
_POINTS_OF_A_SEARCH = 2
_PATIENCE = 1_000
_LIMIT = 20_000


class Assumptions:
    """Counts assumptions by kind, text, operator and source line."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str, str]] = Counter()

    def add(self, kind: str, text: str, *, op: str = "", source: str = "") -> None:
        self._counts[kind, text, op, source] += 1

    def listed(self) -> list[Assumption]:
        """All of them, the most frequent first."""
        return [
            Assumption(kind=kind, text=text, op=op, source=source, count=count)
            for (kind, text, op, source), count in self._counts.most_common()
        ]


@dataclass
class _Loop:
    """What is known of a loop whose header asks for a device value."""

    rounds: int = 0
    """How often it went on since it began, or since the optimizer last stepped."""
    steps: int = 0
    """Number of optimizer steps when it last went on."""
    trains: bool = False
    """Whether the optimizer stepped while it ran."""


class Answers:
    """Python values for device scalars of unknown content."""

    def __init__(
        self,
        assumptions: Assumptions,
        source: Callable[[], str],
        in_model: Callable[[], bool],
        alike: Callable[[str], int],
    ) -> None:
        """`source()` gives the `file:line` that asks, `in_model()` whether a module is running, and
        `alike(source)`, called once a turn, how many turns of a loop there were like the last."""
        self.finishing = False
        """Whether enough has been seen: then training loops end when they ask."""
        self._assumptions = assumptions
        self._source = source
        self._in_model = in_model
        self._alike = alike
        self._asked: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._loops: defaultdict[str, _Loop] = defaultdict(_Loop)
        self._broken: set[str] = set()
        self._steps = 0
        self._points = 0

    def new_step(self) -> None:
        """To be called when the optimizer stepped: loops are bounded within one step."""
        self._asked.clear()
        self._ended.clear()
        self._steps += 1

    def scalar(
        self, dtype: torch.dtype, origin: str, count: int = 1
    ) -> bool | int | float | complex:
        """A value for a one-element tensor, `count` for an integer. Raises CaptureError for a loop
        that never ends."""
        source = self._source()
        who = asking()
        if dtype == torch.bool and who.holds is not None:
            holds = origin in _TRUE_ORIGINS if origin in _HEALTH else who.holds
            return self._branch(holds, origin, source)
        self._asked[source] += 1
        times = self._asked[source]
        if times > _LIMIT:
            raise CaptureError(
                f"{source}: asked {times:,} times in one step for a device value that cannot be "
                f"known here (from {origin or 'the model'})",
                "give the loop a fixed bound, or skip it when estimating",
            )
        if who.lbfgs:
            return self._lbfgs(who.lbfgs, dtype, source, times)
        if who.breaks is not None and origin not in _HEALTH:
            ends = not who.breaks.goes_on if dtype == torch.bool else who.breaks.ends
            most = _ROUNDS if source in self._broken else _ALIKE
            if ends is not None and self._alike(source) >= most:
                self._broken.add(source)
                text = f"a loop that may break on a device value does after {most} turns alike"
                self._assumptions.add("loop", text, op=origin, source=source)
                return ends if dtype == torch.bool or dtype.is_floating_point else int(ends)
        impatient = times > (_ROUNDS if who.turns else _PATIENCE) and times % 2 == 0
        if dtype == torch.bool:
            usual = origin in _TRUE_ORIGINS
            if origin == "any" and who.goes_further is not None:
                usual = who.goes_further  # of a mask, which selects some elements and others not
            if who.goes_on is not None and origin not in _HEALTH:
                patience = _PATIENCE if usual == who.goes_on else None
                return self._goes_on(source, origin, patience) == who.goes_on
            return self._branch(usual != impatient, origin, source)
        if who.number is not None and who.ends is not None:
            number = who.number if self._goes_on(source, origin, None) else who.ends
            return number if dtype.is_floating_point else int(number)
        if dtype.is_floating_point or dtype.is_complex:
            value = 0.0 if impatient else 1.0
            self._assumptions.add(
                "value", f"a device value read by the script is {value}", op=origin, source=source
            )
            return value
        text = f"an integer device value read by the script is {count:,}"
        self._assumptions.add("value", text, op=origin, source=source)
        return count

    def checked(self, value: bool) -> bool:
        """The answer for a condition that was computed as if every rank were like this one: in a
        check, the value with which the script goes on."""
        holds = asking().holds
        if holds is None or holds == value:
            return value
        text = "a check passes that compares what the ranks have"
        self._assumptions.add("branch", text, source=self._source())
        return holds

    def _branch(self, answer: bool, origin: str, source: str) -> bool:
        text = f"a condition on a device value is {answer}"
        self._assumptions.add("branch", text, op=origin, source=source)
        return answer

    def _goes_on(self, source: str, origin: str, patience: int | None) -> bool:
        """Whether a `while` loop whose header asks goes on.

        A loop in which the optimizer steps goes on as long as more steps are wanted. Another one
        ends after `patience` rounds: by default a few, fewer in a model, one inside another loop.
        """
        loop = self._loops[source]
        if loop.rounds and self._steps > loop.steps:
            loop.trains = True
            loop.rounds = 0
        if patience is None:
            patience = _ROUNDS_IN_MODEL if self._in_model() else _ROUNDS
            if self._ended[source] >= _FEW_LOOPS:
                patience = _FEWEST_ROUNDS
        if loop.trains:
            patience = 0 if self.finishing else _PATIENCE
            text = "a training loop on a device value goes on until its steps repeat"
            self._assumptions.add("loop", text, op=origin, source=source)
        if loop.rounds >= patience:
            if not loop.trains:
                text = f"a loop on a device value ends after {loop.rounds} rounds"
                self._assumptions.add("loop", text, op=origin, source=source)
                self._ended[source] += 1
            loop.rounds = 0
            return False
        loop.rounds += 1
        loop.steps = self._steps
        return True

    def _lbfgs(self, question: str, dtype: torch.dtype, source: str, times: int) -> bool | float:
        """Answers for L-BFGS on a smooth function: the curvature condition holds, so that its
        history grows; a line search tries a second point; the loss falls at every evaluation, and
        no tolerance is reached before `max_iter`."""
        text = (
            "L-BFGS keeps every direction up to history_size, searches each line at two points, "
            "and runs to max_iter"
        )
        self._assumptions.add("optimizer", text, source=source)
        if dtype != torch.bool:
            return 1.0 / times
        if question == "gtd > -tolerance_change":
            self._points = 0
        if question == "abs(gtd_new) <= -c2 * gtd":
            self._points += 1
            return self._points == _POINTS_OF_A_SEARCH
        return question == "ys > 1e-10"
