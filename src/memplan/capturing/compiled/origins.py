"""Where the buffers of a compiled graph come from, in the job's own words.

Inductor knows of each buffer the nodes of the graph that it holds the result of, and Dynamo wrote
down for each node the module and the line of the model. The generated code names a buffer in the
line that makes it, which is how a request finds its operator.
"""

from __future__ import annotations

import re
from typing import Any

from memplan.capturing.recording.context import BufferOrigin, shown_path

_ASSIGNED = re.compile(r"\s*(\w+) = ")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_ROOT = re.compile(r"^L\[[^\]]*\]\.?")
_ITEM = re.compile(r"\._modules\['([^']*)'\]|\[['\"]?([^\]'\"]*)['\"]?\]")


def origins(lowering: Any, source: str) -> dict[int, BufferOrigin]:
    """The origins of buffers, by the lines of the `source` that Inductor generated for a graph."""
    order = {node: number for number, node in enumerate(lowering.graph.nodes)}
    found = {}
    for number, line in enumerate(source.splitlines(), start=1):
        assigned = _ASSIGNED.match(line)
        buffer = lowering.name_to_buffer.get(assigned[1]) if assigned is not None else None
        node = _node_of(buffer, order) if buffer is not None else None
        if node is not None:
            found[number] = origin_of(node)
    return found


def origin_of(node: Any) -> BufferOrigin:
    """The origin of a node's result."""
    target = node.target
    name: str = getattr(target, "_opname", "") or getattr(target, "__name__", str(target))
    return BufferOrigin(name, _module_of(node), _line_of(node))


def _node_of(buffer: Any, order: dict[Any, int]) -> Any:
    """The node whose result a buffer holds: of those that were fused into it the last."""
    node = buffer.get_origin_node()
    if node is None:
        node = max(buffer.get_origins(), key=lambda each: order.get(each, -1), default=None)
    return node


def _module_of(node: Any) -> str:
    """Below the module that was compiled, and of a backward node that of its forward one; empty
    where none is known."""
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed(list(stack.values()))), "")
    return _ITEM.sub(lambda item: f".{item[1] or item[2]}", _ROOT.sub("", path)).strip(".")


def _line_of(node: Any) -> str:
    """`file:line` of the innermost frame that is the job's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    shown = [f"{path}:{line}" for file, line in frames if (path := shown_path(file))]
    return shown[-1] if shown else ""
