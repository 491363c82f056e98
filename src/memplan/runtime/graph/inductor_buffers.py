"""Reads the buffers of the code that PyTorch Inductor generates: sizes, lifetimes and aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep

from memplan.capturing.operators.call_memory import NOTHING, CallMemory
from memplan.runtime.graph.program import chains_of
from memplan.runtime.graph.scratch import call_memory, kept_workspaces
from memplan.types.graph import Graph, csr
from memplan.types.trace import I64


@dataclass(frozen=True)
class InputBuffer:
    """The memory of an input of a graph."""

    storage: str
    """A name, the same for inputs that share memory."""
    bytes: int
    """Size of the storage."""
    outlives_graph: bool
    """Whether something else holds it, too, as long as the graph runs."""


class UnknownSizeError(Exception):
    pass


class BufferReader:
    """Reads the kernels and buffers of a graph that Inductor has scheduled."""

    def __init__(
        self, graph: Any, nodes: Sequence[Any], buffers: Sequence[InputBuffer | None]
    ) -> None:
        self._graph = graph
        self._nodes = nodes
        self._scheduler = graph.scheduler
        self._input_of = dict(zip(graph.graph_inputs, buffers, strict=False))
        lasting = (one for one in buffers if one is not None and one.outlives_graph)
        self.held = [*_blocks(lasting), *self._constants()]
        """The blocks, in bytes, that sum up to the graph's `base_bytes`."""
        self._row = {
            buffer.get_name(): row
            for row, node in enumerate(nodes)
            for buffer in node.get_outputs()
        }
        self._reused: dict[str, str] = {}
        self._roots: dict[str, frozenset[str]] = {}

    def graph(self, *, guess: bool) -> Graph:
        """Kernels in their order, and buffers. `guess`: before code is generated. Then it is not
        known which buffers reuse others, and only likely which are not allocated at all."""
        unmade = self._unmade() if guess else self._not_made()
        if not guess:
            self._reused = dict(_reuses(self._graph.wrapper_code.lines))
            self._roots.clear()
        bytes_of: dict[str, int] = {}
        makers: dict[str, set[int]] = {}
        users: dict[str, set[int]] = {}
        for row, node in enumerate(self._nodes):
            for buffer in node.get_outputs():
                self._make(buffer.node, row, unmade, bytes_of, makers)
        for row, node in enumerate(self._nodes):
            for name in self._used(node):
                for root in self._root(name):
                    users.setdefault(root, set()).add(row)
        for tuple_of, parts in self._parts().items():
            # A tuple keeps its elements alive until all of them are taken out.
            taken = {self._row[name] for name in parts if name in self._row}
            for root in {*self._own(parts), *self._own([tuple_of])}:
                makers.setdefault(root, set()).add(self._row[tuple_of])
                users.setdefault(root, set()).update(taken)
        return self._columns(bytes_of, makers, users)

    @cached_property
    def _memory(self) -> list[list[CallMemory]]:
        """What the operators of each node allocate beside their results."""
        return [[_memory(one) for one in node.get_nodes()] for node in self._nodes]

    def scratch_high(self) -> I64:
        """`Graph.scratch` with the largest workspaces that libraries may choose."""
        return np.array([sum(one.high for one in of) for of in self._memory], np.int64)

    def workspaces(self) -> list[int]:
        """Blocks, in bytes, that libraries keep once they are used."""
        return kept_workspaces(one for of in self._memory for one in of)

    def returned(self) -> list[InputBuffer | None]:
        """The buffer of each output; None where it is no tensor. To be called after `graph`."""
        found: list[InputBuffer | None] = []
        for output in self._graph.graph_outputs:
            name = name_of(output)
            if name is None:
                found.append(None)
                continue
            roots = sorted(self._root(name))
            known = [self._input_of.get(root) for root in roots]
            held = [one for one in known if one is not None]
            made = [root for root, one in zip(roots, known, strict=True) if one is None]
            total = sum(one.bytes for one in held) + sum(map(self._size, made))
            first = held[0].storage if held else roots[0]
            found.append(InputBuffer(first, total, bool(held) and held[0].outlives_graph))
        return found

    def _columns(
        self, bytes_of: dict[str, int], makers: dict[str, set[int]], users: dict[str, set[int]]
    ) -> Graph:
        nodes, lasting = self._nodes, self._lasting()
        before = self._before()
        inputs: dict[str, tuple[int, set[int]]] = {}
        for name, one in self._input_of.items():
            if one is not None and not one.outlives_graph:
                _, rows = inputs.setdefault(one.storage, (one.bytes, set()))
                mine = users.get(name, set()) | makers.get(name, set())
                rows |= mine
                if not mine or name in lasting:
                    rows.add(len(nodes))  # the code does not free inputs that it does not use
        values: list[tuple[str, int, int, bool, set[int]]] = []
        for name, (size, rows) in inputs.items():
            values.append((name, size, -1, len(nodes) in rows, rows - {len(nodes)}))
        for root, size in bytes_of.items():
            if size and makers.get(root):
                first = min(makers[root])
                others = (makers[root] | users.get(root, set())) - {first}
                values.append((root, size, first, root in lasting, others))
                for row in others:
                    before[row].add(first)
        before_start, before_rows = csr(before)
        users_start, user_rows = csr([rows for *_, rows in values])
        found = Graph(
            name=[node.get_name() for node in nodes],
            scratch=np.array([sum(one.expected for one in of) for of in self._memory], np.int64),
            before_start=before_start,
            before=before_rows,
            bytes=np.array([size for _, size, *_ in values], np.int64),
            maker=np.array([maker for _, _, maker, *_ in values], np.int64),
            lasts=np.array([lasts for *_, lasts, _ in values], np.bool_),
            users_start=users_start,
            users=user_rows,
            base_bytes=sum(self.held),
            value_name=[name for name, *_ in values],
        )
        found.check()
        return found

    def _before(self) -> list[set[int]]:
        chains: dict[str, int] = {}
        found = []
        for row, node in enumerate(self._nodes):
            needs = {
                self._row[dep.name] for dep in node.unmet_dependencies if dep.name in self._row
            }
            for chain in _chains(node):
                if chain in chains:
                    needs.add(chains[chain])
                chains[chain] = row
            found.append(needs - {row})
        return found

    def _make(
        self,
        buffer: Any,
        row: int,
        unmade: set[str],
        bytes_of: dict[str, int],
        makers: dict[str, set[int]],
    ) -> None:
        name = buffer.get_name()
        roots = self._root(name)
        for root in roots:
            makers.setdefault(root, set()).add(row)
        if name in roots:
            bytes_of[name] = 0 if name in unmade else self._size(name)

    def _used(self, node: Any) -> Iterator[str]:
        for dep in node.read_writes.reads:
            if not (isinstance(dep, WeakDep) and dep.is_fake):
                yield dep.name
        for dep in node.read_writes.writes:
            yield dep.name

    def _root(self, name: str) -> frozenset[str]:
        """The buffers or inputs whose memory a buffer uses."""
        if name not in self._roots:
            self._roots[name] = frozenset({name})  # a buffer may alias itself
            found = self._below(name)
            if found:
                self._roots[name] = frozenset[str]().union(*map(self._root, found))
        return self._roots[name]

    def _below(self, name: str) -> list[str]:
        if name in self._reused:
            return [self._reused[name]]
        real = self._scheduler.mutation_real_name.get(name)
        if real is not None and real != name:
            return [real]
        known = self._scheduler.name_to_buf.get(name)
        if known is None:
            return []
        layout = known.node.layout
        if isinstance(layout, ir.NonOwningLayout):
            return [layout.view.get_name()]
        return [one for one in (*known.get_aliases(), *known.get_mutations()) if one != name]

    def _own(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._root(name) == {name}]

    def _size(self, name: str) -> int:
        known = self._scheduler.name_to_buf.get(name)
        if known is None:
            return 0
        unused = self._unused(known.node)
        return sum(map(self._bytes, unused)) + self._bytes(known.node)

    def _bytes(self, buffer: Any) -> int:
        if isinstance(buffer.layout, (ir.NoneLayout, ir.MultiOutputLayout)):
            return 0
        elements = self._graph.get_allocation_storage_size(buffer)
        try:
            return int(elements) * int(buffer.get_dtype().itemsize)
        except TypeError as error:
            raise UnknownSizeError(str(elements)) from error

    def _unused(self, buffer: Any) -> list[Any]:
        """Elements of a result that are never taken out: alive as long as the result."""
        if not isinstance(buffer.layout, ir.MultiOutputLayout):
            return []
        outputs = [one for one in getattr(buffer, "outputs", ()) if isinstance(one, ir.MultiOutput)]
        return [one for one in outputs if one.get_name() not in self._row]

    def _parts(self) -> dict[str, list[str]]:
        """The names of the elements of each result of several tensors, by the result's name."""
        found: dict[str, list[str]] = {}
        for node in self._nodes:
            for buffer in node.get_outputs():
                made: Any = buffer.node
                if isinstance(made.layout, ir.MultiOutputLayout):
                    found.setdefault(made.get_name(), [])
                elif isinstance(made, ir.MultiOutput):
                    of: Any = made.inputs[0]
                    found.setdefault(of.get_name(), []).append(made.get_name())
        return {name: parts for name, parts in found.items() if name in self._row}

    def _unmade(self) -> set[str]:
        """Buffers that are only used within one kernel."""
        found = set()
        for node in self._nodes:
            inside = {one.get_name() for one in node.get_nodes()}
            for buffer in node.get_outputs():
                name = buffer.get_name()
                if self._scheduler.can_buffer_be_removed_through_fusion(name, inside):
                    found.add(name)
        return found

    def _not_made(self) -> set[str]:
        return {*self._graph.removed_buffers, *self._graph.inplaced_to_remove}

    def _lasting(self) -> set[str]:
        names = (name_of(output) for output in self._graph.graph_outputs)
        return {root for name in names if name is not None for root in self._root(name)}

    def _constants(self) -> list[int]:
        return [one.untyped_storage().nbytes() for one in self._graph.constants.values()]


def name_of(output: Any) -> str | None:
    if isinstance(output, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)):
        return None
    return str(output.get_name())


def _chains(node: Any) -> Iterator[str]:
    for one in node.get_nodes():
        operator = getattr(one.node, "op_overload", None)
        if isinstance(operator, torch._ops.OpOverload):
            yield from chains_of(operator)


def _memory(node: Any) -> CallMemory:
    """What a kernel allocates beside its results: as `SCRATCH` says, or on CUDA by the rules for
    PyTorch's own operators. Kernels that Inductor generates allocate nothing."""
    operator = getattr(node.node, "op_overload", None)
    tell = SCRATCH.get(operator) if operator is not None else None
    if tell is not None:
        return CallMemory(told := tell(node.node), told)
    device = node.get_device()
    if not node.is_extern() or device is None or device.type != "cuda":
        return NOTHING
    origins = (call_memory(one, partial(_laid_out, node.node.inputs)) for one in _origins(node))
    return max(origins, key=lambda of: (of.expected, of.high, of.kept), default=NOTHING)


def _origins(node: Any) -> list[fx.Node]:
    """Nodes of the graph whose operator this calls. Inductor notes a single one only where the call
    gives that node's result, not where it also adds a bias."""
    first = node.node.get_origin_node()
    called = getattr(getattr(node.node, "op_overload", None), "overloadpacket", None)
    if first is not None or called is None:
        return [] if first is None else [first]
    known = node.node.get_origins()
    return [one for one in known if getattr(one.target, "overloadpacket", None) is called]


def _laid_out(inputs: Sequence[Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """An operator's tensors with Inductor's strides, which decide what a convolution copies."""
    if any(isinstance(size, torch.SymInt) for one in tensors for size in one.shape):
        raise UnknownSizeError
    found = []
    for tensor, buffer in zip(tensors, inputs, strict=False):
        size, stride = (tuple(map(int, of)) for of in (buffer.get_size(), buffer.get_stride()))
        alike = size == tuple(tensor.shape)
        found.append(tensor.new_empty_strided(size, stride) if alike else tensor)
    return [*found, *tensors[len(found) :]]


SCRATCH: dict[Any, Callable[[Any], int]] = {}
"""Functions that give the bytes that an operator allocates and frees, from Inductor's node."""


def _reuses(lines: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Pairs of a buffer and the one whose memory it reuses."""
    for line in lines:
        old, new = getattr(line, "node", None), getattr(line, "reused_as", None)
        if old is not None and new is not None:
            yield new.get_name(), old.get_name()


def held_bytes(buffers: Iterable[InputBuffer | None]) -> int:
    return sum(_blocks(buffers))


def _blocks(buffers: Iterable[InputBuffer | None]) -> list[int]:
    return list({one.storage: one.bytes for one in buffers if one is not None}.values())
