"""Runs a graph in a given order and frees each value after its last use."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx

from memplan.capturing.compiled.origins import origin_of
from memplan.capturing.recording.context import ORIGINS, BufferOrigin
from memplan.runtime.graph.program import MemplanOp, facts_of
from memplan.types.trace import Phase

_LITERALS = (type(None), bool, int, str)
_numbers = count()


class Executable:
    """A graph as one Python function with one line for each operator.

    A line also drops the values that it uses last, which frees their storages unless something
    outside holds them.
    """

    def __init__(
        self,
        order: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        output: fx.Node,
        *,
        grad_mode: bool = True,
        whole_step: bool = False,
    ) -> None:
        """`order`: all nodes but inputs and output, each after those that it needs; elements of a
        result right after it, because as a whole it keeps all of them alive. `output`: its first
        argument is returned. `grad_mode`: run forward's nodes with gradients enabled and
        backward's without, as autograd does; otherwise the mode of the caller is kept.
        `whole_step`: the graph has the backward pass in it, of which a trace of memory should know.
        Raises ValueError where a node comes before one that it needs."""
        self._sets_grad_mode = grad_mode
        self._nodes = [node for node in order if node.op != "get_attr"]
        self._space: dict[str, Any] = {}
        self._constants: dict[int, str] = {}
        names = {node: f"v{number}" for number, node in enumerate((*inputs, *order))}
        self._names = names
        for node in order:
            if node.op == "get_attr":
                names[node] = self._constant(getattr(node.graph.owning_module, str(node.target)))
        lasting = {facts_of(node).storage for node in inputs} - {None}
        self._detached = {
            place
            for place, node in enumerate(_items(output.args[0]))
            if isinstance(node, fx.Node) and _is_view(node) and facts_of(node).storage in lasting
        }
        """Outputs that are views of inputs. Code below autograd returns views of parameters as
        tensors that require a gradient, so these are detached."""
        lines = self._write(inputs, output)
        self._space[ORIGINS] = {
            line: _origin_of(node, whole_step=whole_step)
            for line, node in enumerate(self._nodes, start=_FIRST_LINE)
        }
        source = "\n".join(lines)
        self._file = f"<memplan step {next(_numbers)}>"
        linecache.cache[self._file] = (len(source), None, source.splitlines(True), self._file)
        weakref.finalize(self, linecache.cache.pop, self._file, None)
        exec(compile(source, self._file, "exec"), self._space)
        self._function: Callable[[list[Any]], tuple[Any, ...]] = self._space["step"]

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the graph and return its outputs. `values`, one for each input, is emptied."""
        before = torch.is_grad_enabled()
        try:
            with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
                values[:] = map(_without_subclass, values)
                outputs = self._function(values)
        finally:
            torch.set_grad_enabled(before)
        if not self._detached:
            return outputs
        return tuple(
            output.detach() if place in self._detached else output
            for place, output in enumerate(outputs)
        )

    def within(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the graph as a part of another one: the modes of that hold, and tensors are plain."""
        return self._function(values)

    def failed_at(self, error: BaseException) -> int | None:
        """Index in `nodes` of the node that raised `error`; None where it was raised elsewhere."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                place = trace.tb_lineno - _FIRST_LINE
                return place if 0 <= place < len(self._nodes) else None
            trace = trace.tb_next
        return None

    @property
    def nodes(self) -> list[fx.Node]:
        """Nodes in the order in which they run."""
        return self._nodes

    def _write(self, inputs: Sequence[fx.Node], output: fx.Node) -> list[str]:
        names = self._names
        last = {
            used: line
            for line, node in enumerate(self._nodes)
            for used in (node, *node.all_input_nodes)
        }
        stays = {*output.all_input_nodes, *(node for node in names if node.op == "get_attr")}
        dropped: dict[int, list[str]] = {}
        for node, line in last.items():
            if node not in stays:
                dropped.setdefault(line, []).append(names[node])
        unused = [names[node] for node in inputs if node not in last and node not in stays]
        unpack = f"{', '.join(names[node] for node in inputs)}, = values" if inputs else "pass"
        lines = ["def step(values):", f"    {unpack}", "    values.clear()", f"    {_drop(unused)}"]
        assert len(lines) == _FIRST_LINE - 1
        there = {*inputs, *(node for node in names if node.op == "get_attr")}
        grad_mode: bool | None = None
        for line, node in enumerate(self._nodes):
            if missing := next((one for one in node.all_input_nodes if one not in there), None):
                raise ValueError(f"{node} runs before {missing}, which it needs")
            there.add(node)
            parts = self._call(node, dropped.get(line, ()))
            with_gradients = not facts_of(node).backward
            sets = self._sets_grad_mode and not _is_view(node)
            if sets and grad_mode is not with_gradients:
                grad_mode = with_gradients
                parts.insert(0, f"{self._constant(torch.set_grad_enabled)}({grad_mode})")
            parts.append(_drop(dropped.get(line, ())))
            lines.append("    " + "; ".join(parts))
        lines.append(f"    return {self._tuple(output.args[0])}")
        return lines

    def _call(self, node: fx.Node, dropped: Sequence[str]) -> list[str]:
        """The statements of a call. `dropped`: names of values that nothing needs afterwards."""
        statements = []
        arguments = [self._expression(value) for value in node.args]
        if isinstance(node.target, MemplanOp) and (place := node.target.takes) is not None:
            taken, arguments[place] = arguments[place], "taken"
            statements = [f"taken = [{taken}]", *([f"{taken} = None"] if taken in dropped else [])]
        arguments += [f"{key}={self._expression(value)}" for key, value in node.kwargs.items()]
        call = f"{self._constant(called(node))}({', '.join(arguments)})"
        return [*statements, f"{self._names[node]} = {call}"]

    def _tuple(self, value: Any) -> str:
        return f"({''.join(self._expression(item) + ', ' for item in _items(value))})"

    def _expression(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if type(value) in _LITERALS:
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._expression, value))}]"
        if type(value) is tuple:
            return self._tuple(value)
        if isinstance(value, dict):
            items = (f"{key!r}: {self._expression(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """The name of an object in the function's namespace."""
        name = self._constants.get(id(value))
        if name is None:
            name = f"c{len(self._constants)}"
            self._constants[id(value)] = name
            self._space[name] = value
        return name


def _without_subclass(value: Any) -> Any:
    """A tensor without a class that only Python's functions know: PyTorch's own dispatch mode in
    the first call of a compiled graph knows no such classes."""
    kind = type(value)
    if kind in _PLAIN or not issubclass(kind, torch.Tensor) or issubclass(kind, torch.nn.Parameter):
        return value
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return value
    return value.as_subclass(torch.Tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_VIEW_OR_COPY = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""PyTorch's shape rules and kernels do not always agree on the strides of a result (batch norm of a
transposed input, arithmetic of an expanded one). A view that the real strides do not allow becomes
a copy, as it does in autograd."""
_FIRST_LINE = 5
"""Line number of the first node."""


def _origin_of(node: fx.Node, *, whole_step: bool) -> BufferOrigin:
    """For a memory trace: which source line and phase a line of the function belongs to."""
    found = origin_of(node)
    if not whole_step:
        return found
    facts = facts_of(node)
    phase = Phase.BACKWARD if facts.backward else Phase.FORWARD
    return found._replace(
        source=found.source or "memplan.compile",
        phase=Phase.OPTIMIZER if facts.update else phase,
    )


def called(node: fx.Node) -> Any:
    """What a node's line calls."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _VIEW_OR_COPY.get(target, target)._op  # what calling it calls
    return target


def _is_view(node: fx.Node) -> bool:
    """Whether a node runs no kernel: a view, or arithmetic of Python numbers."""
    return node.op == "call_function" and facts_of(node).no_kernel


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _drop(names: Sequence[str]) -> str:
    return "".join(f"{name} = " for name in names) + "None" if names else "pass"
