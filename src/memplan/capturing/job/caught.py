"""Errors that the job raised in its steps and that did not end it: code of its own caught them.

Such an error cuts a step short, and the memory that the rest would have asked for is nowhere. Where
memplan or an operator raised it, a real run may well have gone on: then there is no answer,
whatever the script made of the error. An error of Python code is said.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capturing.job.faults import is_ours, of_shape_rule, place_of, short_message
from memplan.capturing.patches.internals import refusal
from memplan.capturing.recording.context import Context
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError, MemplanError

_MARK = "_memplan_noted"
_MOST = 5
_LONGEST = 200


@dataclass
class _Noted:
    """What is kept of an error: it would itself keep the memory alive that its frames hold."""

    kind: str
    message: str
    place: str
    cause: MemplanError | None
    """What memplan raised."""
    of_operator: bool
    trains: bool = False

    def refusal(self) -> MemplanError | None:
        """What to raise where a step that trains was cut short by this."""
        if self.cause is not None:
            return self.cause
        if not self.of_operator:
            return None
        return CaptureError(
            f"{self.place}: the script caught {self.kind}: {self.message}; what the rest of the "
            "step would have asked for was not seen",
            of_shape_rule(self.message)
            or "mend it, or leave it out when estimating, if a real run meets it too; else memplan "
            "is at fault, please report it",
        )


class Caught:
    """Takes note of errors where operators, models and backward passes raise them."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self._errors: list[_Noted] = []
        state.on_error = self.of_operator

    @contextmanager
    def noted(self, *_call: Any, **_keywords: Any) -> Iterator[None]:
        """A context manager for a model's call or, for a `JobObserver`, a backward pass."""
        try:
            yield
        except Exception as error:
            self._passes(error)
            raise

    def of_operator(self, error: Exception) -> None:
        """An operator raises an error, which the script may catch."""
        self._note(error, of_operator=True)

    def _passes(self, error: Exception) -> None:
        """A model or a backward pass raises one."""
        # PyTorch's own ends of a loop or of a recomputation are no errors.
        if not (isinstance(error, StopIteration) or type(error).__name__.startswith("_")):
            self._note(error, of_operator=False)

    def not_caught(self, error: BaseException) -> None:
        """The job has ended by this error, after its training."""
        seen: BaseException | None = error
        while seen is not None:
            self._errors = [one for one in self._errors if one is not getattr(seen, _MARK, None)]
            seen = seen.__cause__ or seen.__context__

    def settle(self) -> None:
        """The job has ended, and by none of these. Raises CaptureError for one of memplan's or of
        an operator's that cut a step short; others become assumptions."""
        cut_short = [error for error in self._errors if error.trains]
        for error in cut_short:
            if (refused := error.refusal()) is not None:
                raise refused
        different = {(error.kind, error.place): error for error in cut_short}
        for error in list(different.values())[:_MOST]:
            self._state.assumptions.add(
                "caught",
                f"the script caught {error.kind} ({error.message}) and went on; what was cut short "
                "is taken to need no more",
                source=error.place,
            )

    def _note(self, error: Exception, *, of_operator: bool) -> None:
        if self._state.recorder.finished:
            return
        known: _Noted | None = getattr(error, _MARK, None)
        if known is None:
            known = self._new(error, of_operator)
        known.trains = known.trains or _trains(self._state.context)

    def _new(self, error: Exception, of_operator: bool) -> _Noted:
        message = textwrap.shorten(short_message(error), _LONGEST, placeholder=" …")
        # The error has not come by the frames above this one yet.
        place = place_of(error) or self._state.source()
        cause = memplan_cause(error)
        noted = _Noted(
            type(error).__name__,
            message,
            place,
            CaptureError(cause.message, cause.hint) if cause is not None else None,
            of_operator or is_ours(error),
        )
        if hasattr(error, "__dict__"):
            setattr(error, _MARK, noted)
        self._errors.append(noted)
        return noted


def memplan_cause(error: BaseException) -> MemplanError | None:
    """The error of ours that the script's own error handling may have wrapped."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemplanError):
            return seen
        if (of_pytorch := refusal(seen)) is not None:
            return of_pytorch
        seen = seen.__cause__ or seen.__context__
    return None


def _trains(context: Context) -> bool:
    if torch._C._current_graph_task_id() != -1 or context.in_optimizer:
        return True
    return context.module_seen and (torch.is_grad_enabled() or context.in_function > 0)
