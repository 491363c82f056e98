"""The graph of a compiled step, without a run of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

from memplan.runtime.graph import step_capture
from memplan.runtime.graph.operator_graph import OperatorGraph


class _FoundError(BaseException):
    """Ends the call; the step and PyTorch's compiler catch other exceptions."""


def graph_of(step: Any, *batch: Any) -> OperatorGraph:
    """What `memplan.compile` makes of a call with these arguments, in program order."""
    found = []

    def keep(graph: OperatorGraph, **_options: Any) -> Any:
        found.append(graph)
        raise _FoundError

    with mock.patch.object(step_capture, "choose_order", keep), suppress(_FoundError):
        step(*batch)
    return found[0]
