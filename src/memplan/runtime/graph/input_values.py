"""Python numbers that follow from a step's inputs alone, as constants of a capture.

Dynamo captures `item()` and `tolist()` as unknown numbers, and stops where Python branches on one.
Where such a number follows from inputs that need no gradient (whether a mask is causal, the sizes
of pictures), it is computed here while the step is traced. A guard computes it again before each
call, and compares.
"""

from __future__ import annotations

import contextlib
import dis
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Source
from torch.utils._python_dispatch import TorchDispatchMode

_READS = ("item", "tolist")
_VERSION = "memplan_version"
"""Key in `node.meta`: how often a tensor had been written when Dynamo made it."""
_create: Callable[..., None] = TensorVariable.__init__
_call_method: Callable[..., Any] = TensorVariable.call_method


def _init(self: Any, proxy: fx.Proxy, *args: Any, **kwargs: Any) -> None:
    _create(self, proxy, *args, **kwargs)
    made = proxy.node.meta.get("example_value")
    if isinstance(made, torch.Tensor) and not made.is_inference():
        proxy.node.meta.setdefault(_VERSION, made._version)


def _call(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    found = _value(self, tx, name) if name in _READS and not (args or kwargs) else None
    return _call_method(self, tx, name, args, kwargs) if found is None else found


def _jump(run: Callable[..., None]) -> Callable[..., None]:
    """A branch on a tensor itself: `if mask.any():`."""

    def jump(self: Any, instruction: Any) -> None:
        if isinstance(self.stack[-1], TensorVariable):
            self.stack[-1] = _value(self.stack[-1], self, "item") or self.stack[-1]
        run(self, instruction)

    return jump


def _value(tensor: Any, tx: Any, read: str) -> VariableTracker | None:
    """A tensor's value as a constant with a guard; None where it does not follow from inputs."""
    node = tensor.as_proxy().node
    needed = _needed(node)
    leaves = [one for one in needed if one.op == "placeholder"]
    if not all(_is_known(one, needed) for one in needed):
        return None
    compute = _computation(needed, leaves, node, read)
    try:
        value = compute(*(one.meta["grapharg"].example for one in leaves))
    except _RandomError:
        return None
    _guard([one.meta["grapharg"].source for one in leaves], compute, repr(value))
    constant: VariableTracker = VariableTracker.build(tx, value)
    return constant


def _needed(node: fx.Node) -> list[fx.Node]:
    """A node, all from which it is computed, and what writes into that, in their order."""
    found, memory = {node}, {_memory(node)}
    for one in reversed(node.graph.nodes):
        if one in found or not memory.isdisjoint(map(_memory, _written(one))):
            found.update({one, *one.all_input_nodes})
            memory.update(map(_memory, one.all_input_nodes))
    return [one for one in node.graph.nodes if one in found]


def _written(node: fx.Node) -> list[Any]:
    """What a node writes. PyTorch counts what others write as a new version (`_is_known`)."""
    name = str(node.target)
    method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    if method or node.target is operator.setitem:
        return [node.args[0]]
    return node.all_input_nodes if _is_opaque(node) else []


def _is_opaque(node: fx.Node) -> bool:
    """Whether PyTorch may not count what a node writes, or what is written by way of its result."""
    data = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
    return node.target is data or isinstance(node.target, _OPERATORS)


_OPERATORS = (
    torch._ops.HigherOrderOperator,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)


def _memory(node: Any) -> int:
    made = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return made.untyped_storage()._cdata if isinstance(made, torch.Tensor) else -id(node)


def _is_known(node: fx.Node, needed: Sequence[fx.Node]) -> bool:
    """Whether the guard computes a node's value: an input that nothing trains or writes, or the
    result of a plain operator that only nodes of `needed` have written since."""
    if node.target is operator.setitem:
        return True
    made, given = node.meta.get("example_value"), node.meta.get("grapharg")
    if node.op == "placeholder":
        known = given is not None and given.is_tensor and not given.pass_arg_as_tensor
    else:
        known = node.op in ("call_function", "call_method") and not _is_opaque(node)
    if not known or isinstance(made, (list, tuple)):  # whose elements are nodes, too
        return known
    if not isinstance(made, torch.Tensor) or made.requires_grad or _VERSION not in node.meta:
        return False
    after = needed[needed.index(node) + 1 :]
    writes = sum(_memory(node) in map(_memory, _written(one)) for one in after)
    if writes and node.op == "placeholder":
        return False
    return bool(made._version == node.meta[_VERSION] + writes)


def _computation(
    needed: Sequence[fx.Node], leaves: Sequence[fx.Node], result: fx.Node, read: str
) -> Callable[..., Any]:
    """A function of the leaves that computes a number."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {one: graph.placeholder(one.name) for one in leaves}
    for one in needed:
        if one not in copies:
            copies[one] = graph.node_copy(one, copies.__getitem__)
    graph.output(graph.call_method(read, (copies[result],)))
    run = fx.GraphModule({}, graph).forward
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in ("cpu", "cuda")
    ]

    def compute(*tensors: torch.Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_NothingRandom())  # type: ignore[no-untyped-call]
            return run(*tensors)

    return compute


class _RandomError(Exception):
    pass


class _NothingRandom(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _RandomError
        return func(*args, **(kwargs or {}))


def _guard(sources: Sequence[Source], compute: Callable[..., Any], known: str) -> None:
    def same(*tensors: torch.Tensor) -> bool:
        return repr(compute(*tensors)) == known

    def guard(builder: Any, _guard: Any) -> None:
        code = f"___same({', '.join(builder.arg_ref(one.name) for one in sources)})"
        of_guards = {**_get_closure_vars(), "___same": same}
        builder.add_python_lambda_leaf_guard_to_root([code], [code], of_guards)

    if sources:
        install_guard(sources[0].make_guard(guard))


PATCHES: list[tuple[Any, str, Any]] = [
    (TensorVariable, "__init__", _init),
    (TensorVariable, _call_method.__name__, _call),
    *(
        (
            kind,
            "dispatch_table",
            [
                _jump(run) if run is not None and name.startswith("POP_JUMP") else run
                for name, run in zip(dis.opname, kind.dispatch_table, strict=False)
            ],
        )
        for kind in (InstructionTranslator, InliningInstructionTranslator)
    ),
]
