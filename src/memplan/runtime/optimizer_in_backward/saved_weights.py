"""Whether a backward pass will use a parameter after that parameter's gradient is complete.

Asked of the graph before anything of it has run. A node that saved a parameter runs before that
gradient is complete if it takes part in it, which is if the engine gets from it to the node that
accumulates the gradient. Where it does not (a weight that was detached, or used by `.data`, whose
version autograd does not compare), the node may find the weight as it is after its update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from memplan.runtime.optimizer_in_backward.watched import storage_of

_saved_names: dict[type, tuple[str, ...]] = {}
"""For each type of node, the attributes with the packed saved values."""


def roots(tensors: Any) -> list[Any]:
    """The nodes at which a backward pass from tensors or gradient edges begins."""
    found = [getattr(t, "node", None) or getattr(t, "grad_fn", None) for t in tensors]
    return [node for node in found if node is not None]


def used_late(tensors: Any, parameters: Iterable[Tensor]) -> str:
    """The kind of a node that may use one of `parameters` after its gradient is complete; empty
    where none does. What Python code of the graph does (hooks, functions of the user's own) is
    not seen here."""
    by_storage: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        by_storage.setdefault(storage_of(parameter), []).append(parameter)
    for node in nodes(tensors):
        for tensor in _saved(node):
            for parameter in by_storage.get(storage_of(tensor), ()):
                if not _reaches(node, parameter):
                    return str(node.name())
    return ""


def nodes(tensors: Any) -> Iterator[Any]:
    """The nodes of the graph, each once."""
    stack = roots(tensors)
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def leaf(node: Any) -> Tensor | None:
    """The tensor whose gradient a node accumulates."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def _saved(node: Any) -> Iterator[Tensor]:
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
        if not issubclass(kind, BackwardCFunction):  # a class of the job's, perhaps one of many
            _saved_names[kind] = names
    for name in names:
        values = getattr(node, name)
        for value in values if isinstance(values, (list, tuple)) else (values,):
            packed = value.data
            for item in packed if isinstance(packed, (list, tuple)) else (packed,):
                if isinstance(item, Tensor):
                    yield item


def _reaches(node: Any, parameter: Tensor) -> bool:
    """Breadth first: what accumulates a weight's gradient is near to what saved the weight."""
    queue, seen = deque([node]), {node}
    while queue:
        for following, _ in queue.popleft().next_functions:
            if following is None or following in seen:
                continue
            if leaf(following) is parameter:
                return True
            seen.add(following)
            queue.append(following)
    return False


def touches(tensors: Any, parameters: Iterable[Tensor]) -> bool:
    """Whether a backward pass from `tensors` makes a gradient of one of `parameters`."""
    wanted = {id(parameter) for parameter in parameters}
    return any(id(leaf(node)) in wanted for node in nodes(tensors))
