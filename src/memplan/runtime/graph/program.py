"""A graph of ATen operators, and what each operator does to storages.

The graph is the one that AOTAutograd traced: functional, with fake tensors in `node.meta["val"]`.
A fake tensor has the layout of a result, but does not say with what it shares memory; that is in
the operator's schema. Nodes that memplan adds call a `MemplanOp`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from memplan.capturing.operators.call_memory import NOTHING, CallMemory
from memplan.capturing.operators.reduced_losses import kept_bytes
from memplan.runtime.graph.scratch import call_memory, kept_workspaces, on_cuda
from memplan.runtime.graph.workspaces import is_symbolic, workspace_bytes

FACTS = "memplan"
"""Key in `node.meta` of a node's `Facts`."""
BACKWARD = "memplan_backward"
"""Key in `node.meta`: whether a node belongs to the backward pass."""
RANDOM = "random numbers"
"""The chain of operators that draw random numbers."""
UPDATE = "memplan_update"
"""Key in `node.meta`: whether a node belongs to the optimizer's step."""
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")


class MemplanOp:
    """The target of a node that memplan adds to a graph."""

    __name__: str = "memplan_op"
    """fx names nodes after it."""
    writes: tuple[int, ...] = ()
    """Positions of the arguments that it writes."""
    chain: str = ""
    """As in `Facts.chains`; empty for none."""
    barrier: bool = False
    """Whether no other node may move across it."""
    scratch_bytes: int = 0
    """Memory that it allocates and frees while it runs."""
    takes: int | None = None
    """The place of an argument that it is given in a list, to free it while it runs."""

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class StorageFacts:
    """A storage of the graph."""

    bytes: int
    name: str
    """For messages: the name of the placeholder or operator that makes it."""


@dataclass(frozen=True)
class Facts:
    """What a node does. Storages are indices in `Program.storages`."""

    reads: tuple[int, ...] = ()
    """Storages that its arguments are views of."""
    writes: tuple[int, ...] = ()
    """Storages that it changes, without those that it allocates."""
    makes: tuple[int, ...] = ()
    """Storages that it allocates."""
    storage: int | None = None
    """The storage of its result, if that is one storage."""
    chains: tuple[str, ...] = ()
    """Nodes of one chain keep their order: those that draw from one generator, say."""
    no_kernel: bool = False
    """A view, an input or an element of an operator's result: it costs nothing, and runs right
    before its first user."""
    backward: bool = False
    update: bool = False
    """Whether it belongs to the optimizer's step."""
    flops: int = 0
    """FLOPs of matrix products, convolutions and attention, by PyTorch's formulas; else 0."""
    memory: CallMemory = NOTHING
    """What it allocates beside its results."""


@dataclass(eq=False)
class Program:
    """A graph whose nodes carry `Facts` in `node.meta[FACTS]`, the output excepted."""

    graph_module: fx.GraphModule
    inputs: list[int]
    """The storage of each placeholder, alive all the time; -1 for what is no tensor."""
    storages: list[StorageFacts]
    held: Sequence[int] = ()
    """Blocks, in bytes, that the caller holds all the time beside the graph's storages."""
    workspaces: Sequence[int] = ()
    """Blocks, in bytes, that libraries such as cuBLAS keep once they are used."""
    on_cuda: bool = False

    @property
    def base_bytes(self) -> int:
        """Bytes held all the time beside the graph's storages."""
        return sum(self.held) + sum(self.workspaces)

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph_module.graph.find_nodes(op="placeholder"))

    @property
    def output(self) -> fx.Node:
        return self.graph_module.graph.output_node()


def facts_of(node: fx.Node) -> Facts:
    """The `Facts` of a node of a `Program`."""
    facts = node.meta[FACTS]
    assert isinstance(facts, Facts)
    return facts


def program_of(module: fx.GraphModule, held: Sequence[int] = ()) -> Program:
    """Find out what each node does, from its operator's schema and its fake result.

    `held`: see `Program`. Raises ValueError for a node where that is not enough.
    """
    reader = _Reader()
    inputs = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(reader.given(node))
        elif node.op == "get_attr":
            reader.given(node)
        elif node.op != "output":
            node.meta[FACTS] = reader.facts(node)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    workspaces = kept_workspaces(facts_of(node).memory for node in nodes)
    card = any(map(on_cuda, nodes))
    return Program(module, inputs, reader.storages, held, workspaces, card)


def is_element(node: fx.Node) -> bool:
    """Whether a node takes an element of an operator's result."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and (node.args[0].op == "call_function" or is_element(node.args[0]))
    )


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Reader:
    def __init__(self) -> None:
        self.storages: list[StorageFacts] = []
        self._storage_of: dict[fx.Node, Any] = {}
        """The storage of each tensor of a node's result, in a structure like that of the result."""

    def given(self, node: fx.Node) -> int:
        val = node.meta.get("val")
        storage = self._new_storage(val, node.name) if isinstance(val, torch.Tensor) else None
        self._storage_of[node] = storage
        node.meta[FACTS] = Facts(storage=storage, no_kernel=True)
        return -1 if storage is None else storage

    def facts(self, node: fx.Node) -> Facts:
        if node.op != "call_function":
            raise ValueError(f"a node of kind {node.op}: {node.format_node()}")
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, fx.Node) and isinstance(place, int)
            within = self._storage_of[source]
            self._storage_of[node] = within[place] if isinstance(within, (list, tuple)) else within
            return Facts(storage=self._single_storage(node), no_kernel=True)
        before = len(self.storages)
        self._storage_of[node] = self._result(node)
        shown = self._storages(node)
        makes = tuple(sorted(index for index in shown if index >= before))
        writes = self._storages_of(_written(node))
        chains = tuple(_chains(node))
        return Facts(
            reads=self._storages_of(node.all_input_nodes),
            writes=writes,
            makes=makes,
            storage=self._single_storage(node),
            chains=chains,
            no_kernel=bool(shown) and not (makes or writes or chains),
            backward=bool(node.meta.get(BACKWARD)),
            update=bool(node.meta.get(UPDATE)),
            flops=_flops(node),
            memory=_memory(node),
        )

    def _result(self, node: fx.Node) -> Any:
        """The storages of a node's result: those that its schema names, else new ones."""
        val = _wrapped_result(node) if is_random_wrapper(node) else node.meta.get("val")
        aliases, target = _aliases(node), node.target
        one_list = isinstance(target, torch._ops.OpOverload) and len(target._schema.returns) == 1

        def storages(of: Any, place: int) -> Any:
            if isinstance(of, (list, tuple)):
                return [storages(one, number) for number, one in enumerate(of)]
            if not isinstance(of, torch.Tensor):
                return None
            return self._result_storage(of, node, place, aliases.get(0 if one_list else place, ()))

        return storages(val, 0)

    def _result_storage(
        self, val: torch.Tensor, node: fx.Node, place: int, aliases: Sequence[fx.Node]
    ) -> int:
        found = self._storages_of(aliases)
        if len(found) > 1:
            raise ValueError(f"a result that is a view of several: {node.format_node()}")
        if found:
            return found[0]
        new = self._new_storage(val, _name(node))
        if size := kept_bytes(node.target, fx.map_arg(node.args, _value), val):
            self.storages[new] = StorageFacts(size, _name(node))
        if not val.numel() and (size := workspace_bytes(node, place)):
            self.storages[new] = StorageFacts(size, _name(node))
        return new

    def _storages_of(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(index for node in nodes for index in self._storages(node)))

    def _storages(self, node: fx.Node) -> set[int]:
        leaves = pytree.tree_leaves(self._storage_of.get(node))
        return {index for index in leaves if index is not None}

    def _single_storage(self, node: fx.Node) -> int | None:
        found = self._storages(node)
        return found.pop() if len(found) == 1 else None

    def _new_storage(self, val: torch.Tensor, name: str) -> int:
        if val.layout != torch.strided:
            raise ValueError(f"a tensor that is not dense: {name}, {val.layout}")
        if has_free_unbacked_symbols(val):
            raise ValueError(f"a size that depends on values: {name}")
        self.storages.append(StorageFacts(int(val.untyped_storage().nbytes()), name))
        return len(self.storages) - 1


def _aliases(node: fx.Node) -> dict[int, list[fx.Node]]:
    """The arguments of which each result is a view or which it is, by the result's place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    if target.overloadpacket in _VIEWS_UNSAID:
        return {0: node.all_input_nodes[:1]}
    found: dict[int, list[fx.Node]] = {}
    for place, result in enumerate(target._schema.returns):
        if result.alias_info is None:
            continue
        names = set(result.alias_info.before_set)  # empty for a list of views, as of split
        for number, argument in enumerate(target._schema.arguments):
            known = argument.alias_info
            if known is not None and (not names or names & set(known.before_set)):
                given = node.args[number] if number < len(node.args) else None
                leaves = pytree.tree_leaves([given, node.kwargs.get(argument.name)])
                found.setdefault(place, []).extend(n for n in leaves if isinstance(n, fx.Node))
    return found


_VIEWS_UNSAID = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
)
"""Operators whose results are views although their schemas do not say so: autograd needs that."""


def is_random_wrapper(node: fx.Node) -> bool:
    """Whether a node is a wrapper by which PyTorch's partitioner saves or restores the generator's
    state around a random operator. The operator is an argument of it."""
    return node.target in (run_and_save_rng_state, run_with_rng_state)


def _wrapped_result(node: fx.Node) -> Any:
    """The result of a random wrapper; the partitioner does not always note it."""
    if node.target is run_and_save_rng_state:
        elements: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
        return [elements[place].meta["val"] for place in (0, 1)]
    arguments: Any = fx.map_arg((node.args, node.kwargs), lambda needed: needed.meta["val"])
    (state, func, *args), kwargs = arguments
    with state.fake_mode:
        return func(*args, **kwargs)


def _name(node: fx.Node) -> str:
    return type(node.target).__name__ if isinstance(node.target, MemplanOp) else str(node.target)


def _written(node: fx.Node) -> list[fx.Node]:
    """Arguments that a node changes."""
    if isinstance(node.target, MemplanOp):
        found = [node.args[place] for place in node.target.writes]
    elif isinstance(node.target, torch._ops.OpOverload):
        found = []
        for place, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[place] if place < len(node.args) else None
                found += pytree.tree_leaves([given, node.kwargs.get(argument.name)])
        packet = node.target.overloadpacket.__name__
        if packet in _STATISTICS and node.args[5]:
            found += node.args[3:5]
    elif is_random_wrapper(node) or is_symbolic(node.meta.get("val")):
        found = []  # numbers are computed by Python's operators and `torch.sym_…`
    else:
        raise ValueError(f"a node whose effects are not known: {node.format_node()}")
    return [one for one in found if isinstance(one, fx.Node)]


_STATISTICS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Operators that write running statistics in training although their schemas do not say so."""


def _chains(node: fx.Node) -> Iterator[str]:
    target = node.target
    if isinstance(target, MemplanOp):
        if target.chain:
            yield target.chain
    elif is_random_wrapper(node):
        yield RANDOM
    elif isinstance(target, torch._ops.OpOverload):
        yield from chains_of(target)


def chains_of(operator: torch._ops.OpOverload) -> Iterator[str]:
    """The chains (`Facts.chains`) that an operator belongs to."""
    if torch.Tag.nondeterministic_seeded in operator.tags:
        yield RANDOM
    if operator.namespace in _COLLECTIVES:
        yield "collectives"
    elif is_foreign(operator.namespace):
        yield operator.namespace  # such operators may have a state that their schemas do not show


def is_foreign(namespace: str | None) -> bool:
    """Whether operators of a namespace are neither PyTorch's nor memplan's."""
    known = ("aten", "prims", "torchvision", "memplan", "higher_order", *_COLLECTIVES)
    return namespace not in (None, *known)


def _memory(node: fx.Node) -> CallMemory:
    if isinstance(node.target, MemplanOp):
        return CallMemory(node.target.scratch_bytes, node.target.scratch_bytes)
    return call_memory(node)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _flops(node: fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
