"""The `StepProgram`: a whole training step as an FX graph of ATen ops, and what surrounds it.

The graph is what the dispatcher saw, below autograd and autocast: forward, backward and update.
Ops that write in place write the very tensors that they are given, so running the graph on the
model's parameters trains the model; it must run without autograd and with autocast off.

A call of the step is
1. `values = [input.place.read(arguments) for input in program.inputs]`, where `arguments` are the
   leaves of `flatten_arguments(args, kwargs)`; then `place.clear()` for each in `program.frees`
   (old gradients: the graph frees the tensor at its last use where nobody else holds it),
2. `outputs = program.graph_module(*values)`: a tuple; or `forward` of a reordered graph,
3. `program.store(outputs)`: gradients and replaced state are put in their places,
4. for `effect in program.effects: effect()`: Python that follows each step (`scheduler.step()`),
5. `program.result_of(outputs)`: what the step returns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

FACTS = "memplan"
"""Key in `node.meta` of a node's `Facts`."""


class Kind(StrEnum):
    """What an input is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    ARGUMENT = "argument"
    REACHED = "reached"
    """A tensor that the step finds in a closure, a global or an attribute."""
    CONSTANT = "constant"
    """A tensor made from Python data inside the step; the program holds it."""
    SCALAR = "scalar"
    """A Python float that may change between steps: the learning rate."""


class By(StrEnum):
    """How a place is read."""

    ATTRIBUTE = "attribute"
    ITEM = "item"
    ITEM_OF_ITEM = "item of item"
    """`owner[key[0]][key[1]]`: of a tuple in a dict; it cannot be replaced."""
    ARGUMENT = "argument"
    """`key` is the leaf's number in `flatten_arguments(args, kwargs)`; `owner` is None."""
    HELD = "held"
    """`owner` is the value itself."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is between steps."""

    path: str
    """For people: `model.layers.0.weight`, `optimizer.state[model.layers.0.weight]['step']`."""
    by: By
    owner: Any = None
    key: Any = None

    def read(self, arguments: Sequence[Any] = ()) -> Any:
        """What is there now; KeyError, IndexError or AttributeError where nothing is."""
        if self.by is By.ATTRIBUTE:
            return getattr(self.owner, self.key)
        if self.by is By.ITEM:
            return self.owner[self.key]
        if self.by is By.ITEM_OF_ITEM:
            return self.owner[self.key[0]][self.key[1]]
        return arguments[self.key] if self.by is By.ARGUMENT else self.owner

    def reader(self) -> Callable[[], Any]:
        """What `read` does, soonest. An argument is not here: it gives None for one."""
        if self.by is By.ATTRIBUTE:
            return partial(getattr, self.owner, self.key)
        if self.by is By.ITEM:
            return partial(operator.getitem, self.owner, self.key)
        if self.by is By.ARGUMENT:
            return _nothing
        return self.read

    def write(self, value: Any) -> None:
        if self.by is By.ATTRIBUTE:
            setattr(self.owner, self.key, value)
        elif self.by is By.ITEM:
            self.owner[self.key] = value
        else:
            raise ValueError(f"{self.path} cannot be replaced")

    def clear(self) -> None:
        """Lets go of the tensor there."""
        self.write(None)


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Geometry:
    """A tensor as a view of a storage; offset and strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False


@dataclass(frozen=True, eq=False)
class Input:
    """A placeholder of the graph, in order."""

    name: str
    """Of the placeholder."""
    kind: Kind
    place: Place
    storage: int = -1
    """Index in `StepProgram.storages`; inputs that share one must always do. -1: a SCALAR."""
    geometry: Geometry | None = None
    device: torch.device | None = None
    requires_grad: bool = False
    value: Any = None
    """Of a SCALAR, when captured."""


@dataclass(frozen=True)
class Pin:
    """A Python number that the captured step branched on: the program serves while it holds."""

    place: Place
    value: Any
    """When captured."""
    test: tuple[Callable[[Any, Any], Any], Any] | None = None
    """A comparison and what it compares with, where that alone was asked for."""

    def holds(self) -> bool:
        """Whether the step would take the same branch now."""
        value = self.place.read()
        if self.test is None:
            return bool(value == self.value)
        compare, other = self.test
        return bool(compare(value, other)) == bool(compare(self.value, other))


@dataclass(frozen=True, eq=False)
class Gradient:
    """What a step leaves in `.grad`. Gradients that it does not touch are not listed."""

    place: Place
    output: int | None
    """Index of the graph's output; None: no gradient."""


@dataclass(frozen=True, eq=False)
class Rebound:
    """A tensor that the step replaces by another one, in a module or in the optimizer's state."""

    place: Place
    output: int


@dataclass(frozen=True)
class Leaf:
    """Of what the step returns: an output of the graph, or a Python object as it was."""

    output: int | None
    value: Any = None


@dataclass(frozen=True, eq=False)
class StorageFacts:
    """A storage generation."""

    bytes: int
    device: torch.device
    maker: fx.Node
    """The op that allocates it, or the placeholder that brings it."""
    name: str
    """For people: the input's path, or the op's name."""


@dataclass(frozen=True)
class Facts:
    """What a node of the graph does, in storages (indices in `StepProgram.storages`)."""

    reads: tuple[int, ...] = ()
    """Storages whose content it needs, in the order of its arguments."""
    writes: tuple[int, ...] = ()
    """Storages that it changes; those that it makes are not among them."""
    makes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    """Storages that its arguments are views of: alive while it runs, read or not."""
    shows: int | None = None
    """The storage that its result is a view of, where that is one tensor."""
    chains: tuple[str, ...] = ()
    """It keeps its place among the nodes that name the same chain: a generator, a process group."""
    free: bool = False
    """A view, an element of an op's result or arithmetic of Python numbers: no bytes, no kernel.
    It may run anywhere after what it is made from: right before its first user."""
    source: str = ""
    """Module path or `file:line`; empty when unknown."""
    backward: bool = False
    """Run by the autograd engine."""
    update: bool = False
    """Run inside `optimizer.step()`."""
    flops: int = 0
    """Of multiplications of matrices, convolutions and attention, where PyTorch has a formula."""
    grad_mode: bool = True
    """Whether autograd was on: a few kernels compute in another way where it is off."""
    splits: bool = False
    """One of several that a foreach or fused op was split into."""


@dataclass(frozen=True, eq=False)
class Foreseen:
    """Values that got out of tensors, and the graph that gives them before a step begins."""

    graph: fx.Graph
    """Its placeholders are inputs of the program, by name; it returns the values."""
    values: tuple[bool | int | float, ...]
    """When captured."""
    what: tuple[str, ...]
    """For people: how each got out, and on which line."""
    writes: frozenset[int]
    """Storages that the graph changes."""

    @property
    def inputs(self) -> set[str]:
        """Names of the inputs that it needs."""
        return {str(node.target) for node in self.graph.nodes if node.op == "placeholder"}


@dataclass(eq=False)
class StepProgram:
    """A captured step. `graph_module.graph` is in program order; every node but the output carries
    `Facts` in `node.meta[FACTS]`. Nodes that write in place have no users: never eliminate them."""

    graph_module: fx.GraphModule
    inputs: list[Input]
    storages: list[StorageFacts]
    frees: list[Place] = field(default_factory=list)
    """Places to clear before the graph runs: their tensors are freed at the last use, if any."""
    gradients: list[Gradient] = field(default_factory=list)
    rebound: list[Rebound] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    foreseen: Foreseen | None = None
    gradients_before: list[tuple[Place, bool]] = field(default_factory=list)
    """Places of `.grad`, and whether there was one before the step."""
    aliases: list[list[tuple[Place, tuple[Any, ...]]]] = field(default_factory=list)
    """Places of one storage, that of an input; with the view (type, shape, strides and offset) that
    each had."""
    effects: list[Callable[[], object]] = field(default_factory=list)
    result_spec: pytree.TreeSpec | None = None
    result_leaves: list[Leaf] = field(default_factory=list)
    result_name: str = ""
    """What the step returned, for people; `None` where it returned nothing."""

    def read(self, arguments: Sequence[Any]) -> list[Any]:
        """Arguments for the graph. `arguments`: leaves of
        `flatten_arguments(args, kwargs)`."""
        values = [read() for read in self._readers]
        for number, argument in self._arguments:
            values[number] = arguments[argument]
        return values

    @cached_property
    def _readers(self) -> list[Callable[[], Any]]:
        return [one.place.reader() for one in self.inputs]

    @cached_property
    def _arguments(self) -> list[tuple[int, int]]:
        """Inputs that are arguments, by their numbers among both."""
        return [
            (number, one.place.key)
            for number, one in enumerate(self.inputs)
            if one.place.by is By.ARGUMENT
        ]

    def store(self, outputs: Sequence[Any]) -> None:
        """Puts gradients and replaced state in their places."""
        for one in self.gradients:
            one.place.write(None if one.output is None else outputs[one.output])
        for other in self.rebound:
            other.place.write(outputs[other.output])

    def result_of(self, outputs: Sequence[Any]) -> Any:
        """What the step returns; tensors in it are not attached to a graph of autograd."""
        if self.result_spec is None:
            return None
        leaves = [
            leaf.value if leaf.output is None else outputs[leaf.output]
            for leaf in self.result_leaves
        ]
        return pytree.tree_unflatten(leaves, self.result_spec)


def facts_of(node: fx.Node) -> Facts:
    """Of a node of a `StepProgram`."""
    facts = node.meta[FACTS]
    assert isinstance(facts, Facts)
    return facts


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One step that ran plainly, its effects all done, and the program made from it."""

    result: Any
    program: StepProgram | None
    refusal: Exception | None
    """A NotCapturable: why there is no program."""
