"""Weights that a script updates itself, without an optimizer of PyTorch's.

An update happened where a forward pass reads what was computed from the gradients of the backward
pass before it, whatever the script did in between: in place on `p.data` or below `no_grad`, by
multi-tensor operators, or by making new weights. It is looked for where the next backward pass
begins, among the operators recorded since the last one, and ends a step there. In a job that makes
an optimizer of PyTorch's, that one's steps count and nothing is looked for: gradients of gradients
and accumulated ones would be taken for updates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memplan.capturing.state import CaptureState
    from memplan.capturing.training.watcher import StepWatcher


class HandUpdates:
    """Looks for updates between backward passes."""

    def __init__(self, state: CaptureState, steps: StepWatcher) -> None:
        self._state = state
        self._steps = steps
        self._since: int | None = None
        """The first operator of the last backward pass; None before any."""

    def around_backward(self, *_call: Any, **_keywords: Any) -> AbstractContextManager[object]:
        """For a `JobObserver`."""
        if torch._C._current_graph_task_id() == -1:  # not of a checkpoint within another
            self.look(at_end=False)
            self._since = self._state.recorder.builder.ops
        return nullcontext()

    def look(self, *, at_end: bool) -> None:
        """End a step where weights were updated since the last backward pass. `at_end`: no forward
        pass will read them; it is enough that older memory was written."""
        if self._since is None or self._steps.has_optimizers:
            return
        # Without modules nothing tells a forward pass from what is around it.
        in_place = at_end or not self._state.context.module_seen
        if self._state.recorder.builder.updated_by_hand(self._since, in_place=in_place):
            self._since = None
            self._steps.updated_by_hand()
