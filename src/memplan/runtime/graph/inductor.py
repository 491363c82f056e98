"""PyTorch Inductor's code for a graph, in our order, and the bytes that it holds.

Inductor fuses a graph's operators into kernels; then it sorts the kernels for a low peak. Here the
order that it chose is the first candidate, and gives way to one with a lower peak. Which buffers
the code makes, reuses and frees is read off Inductor's own lists after the code is written, so that
the peak is that of the code and not of the graph.
"""

from __future__ import annotations

import functools
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config, ir, memory, scheduler
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.dependencies import WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V

from memplan.order.baselines import Candidate
from memplan.order.bound import cut_bound
from memplan.order.evaluate import lifetimes, peak, program_order
from memplan.order.solve import solve
from memplan.order.updates import early_updates
from memplan.runtime.graph.program import chains_of
from memplan.types.graph import Graph, csr
from memplan.types.solution import Solved
from memplan.types.trace import I64

_NEARLY = 1.01
"""Times the least peak that is possible: a lower one is not worth the seconds of a search."""


@dataclass(frozen=True)
class Given:
    """An input of a graph."""

    storage: str
    """Inputs that share memory name the same."""
    bytes: int
    """Of the storage."""
    lasts: bool
    """Whether somebody else holds it, too, as long as the graph runs."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """What Inductor made of a graph."""

    peak_bytes: int
    """With all inputs, and nothing else of the caller's. Scratch memory of kernels is not in it."""
    returned: list[Given | None]
    """Of each output, what it lies in; None where it is no tensor."""
    strides: list[tuple[int, ...] | None]
    """Of each output: Inductor chooses those that no user sees."""
    calls: int = 0
    """Of kernels."""


def unavailable(devices: Iterable[torch.device]) -> str:
    """Why Inductor cannot make code for these devices; empty where it can."""
    return next(filter(None, map(_unavailable, sorted({device.type for device in devices}))), "")


@functools.cache
def _unavailable(device: str) -> str:
    if device == "cuda":
        # As Inductor's own module has it: a capture needs none, and says so there.
        return "" if scheduler.has_triton() else "no Triton"  # type: ignore[attr-defined]
    if device != "cpu":
        return ""
    try:
        compiler = get_cpp_compiler()
    except Exception as error:
        return f"no C++ compiler: {error}"
    if shutil.which(compiler) is None:
        return f"no C++ compiler {compiler}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"no {header}"


@contextmanager
def uncached() -> Iterator[None]:
    """Around PyTorch's compiler: its caches of whole graphs hold code in another order. Compiled
    kernels are still taken from the cache."""
    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def compiled(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    given: Sequence[Given | None],
    *,
    deadline_seconds: float,
    **options: Any,
) -> tuple[Any, Kernels | None]:
    """Inductor's code for a graph, which it takes over, and what that needs: None where sizes are
    not known before it runs.

    `given`: of each input, None for what is no tensor. `options`: as `compile_fx_inner` takes them.
    """
    with _watched(given, deadline_seconds, look=False) as seen:
        run = compile_fx_inner(module, inputs, **options)
    return run, seen[0] if seen else _without_kernels(module, given)


def looked_at(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    given: Sequence[Given | None],
    *,
    deadline_seconds: float,
    **options: Any,
) -> Kernels | None:
    """What `compiled` would say, without the time that a C++ or GPU compiler takes."""
    with _watched(given, deadline_seconds, look=True) as seen, suppress(_LookedError):
        compile_fx_inner(module, inputs, **options)
    return seen[0] if seen else _without_kernels(module, given)


class _UnknownSizeError(Exception):
    pass


class _LookedError(BaseException):
    """Not caught by Inductor."""


def _without_kernels(module: fx.GraphModule, given: Sequence[Given | None]) -> Kernels:
    """Of a graph that calls nothing."""
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    of = dict(zip(places, given, strict=True))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    returned = [of.get(one) for one in output.args[0]]
    return Kernels(_held(given), returned, [None] * len(returned))


def _held(given: Iterable[Given | None]) -> int:
    return sum({one.storage: one.bytes for one in given if one is not None}.values())


@contextmanager
def _watched(
    given: Sequence[Given | None], deadline_seconds: float, *, look: bool
) -> Iterator[list[Kernels | None]]:
    """While Inductor compiles one graph: its kernels run in our order, and what was made of the
    graph is put into the list."""
    seen: list[Kernels | None] = []
    sort, write = memory.reorder_for_peak_memory, GraphLowering.codegen
    nested: list[int] = []

    def reorder(nodes: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = sort(nodes, *args, **kwargs)
        whole = _is_whole(V.graph)
        try:
            found = _Reader(V.graph, theirs, given if whole else ()).graph(guess=True)
        except _UnknownSizeError:
            return theirs
        if whole:
            return _ordered(found, theirs, deadline_seconds)
        nested.append(_peak(found, program_order(found), theirs))
        return theirs

    def codegen(graph: Any) -> Any:
        result = write(graph)
        if _is_whole(graph):
            with V.set_graph_handler(graph):
                seen[:] = [_kernels(graph, given, max(nested, default=0))]
            if look:
                raise _LookedError
        return result

    with (
        mock.patch.object(memory, "reorder_for_peak_memory", reorder),
        mock.patch.object(GraphLowering, "codegen", codegen),
        config.patch(reorder_for_peak_memory=True),
        uncached(),
    ):
        yield seen


def _kernels(graph: Any, given: Sequence[Given | None], nested: int) -> Kernels | None:
    """`nested`: the peak of a branch or loop, which runs while an operator of the graph does."""
    read = _Reader(graph, graph.scheduler.nodes, given)
    try:
        made = read.graph(guess=False)
        most = _peak(made, program_order(made), graph.scheduler.nodes)
        strides = [_strides(one) for one in graph.graph_outputs]
        return Kernels(most + nested, read.returned(), strides, len(graph.scheduler.nodes))
    except _UnknownSizeError:
        return None


def _is_whole(graph: Any) -> bool:
    """Not the body of a branch or a loop."""
    return type(graph) is GraphLowering


def _ordered(graph: Graph, nodes: list[Any], deadline_seconds: float) -> list[Any]:
    """The nodes in the order of least peak that is found: their own, unless another has less.
    There is no search where a peak is proved to be nearly the least."""
    own = program_order(graph)
    theirs = Candidate("inductor", own, peak(graph, own))
    early = early_updates(graph, own)
    order = early if peak(graph, early) < theirs.peak_bytes else own
    if peak(graph, order) > _NEARLY * cut_bound(graph, order).bytes:
        found = solve(graph, deadline_seconds=deadline_seconds, baselines=lambda: [theirs])
        best = found.solution if isinstance(found, Solved) else found.best
        if best is not None and best.peak_bytes < peak(graph, order):
            order = best.order
    ordered = [nodes[int(row)] for row in order]
    less = _peak(graph, order, ordered) < _peak(graph, own, nodes)
    return ordered if less else nodes


def _peak(graph: Graph, order: I64, nodes: Sequence[Any]) -> int:
    """Of the code for the nodes in this order.

    Kernels on the CPU that follow each other become one call: all their buffers are allocated
    before it, and freed after it.
    """
    starts = [True, *(_calls_apart(*pair) for pair in pairwise(nodes))] if nodes else []
    calls = np.cumsum([0, *starts]) - 1
    start, stop = lifetimes(graph, order)
    alive = stop > start
    change = np.zeros(len(nodes) + 1, np.int64)
    np.add.at(change, calls[start[alive] + 1], graph.bytes[alive])
    np.subtract.at(change, calls[stop[alive]] + 1, graph.bytes[alive])
    held = np.cumsum(change)
    np.add.at(held, calls[1:], graph.scratch[np.asarray(order, np.int64)])
    return graph.base_bytes + int(held.max(initial=0))


def _calls_apart(node: Any, following: Any) -> bool:
    """Whether what the first one needs last is freed before the second one's call."""
    if any(one.is_extern() or one.is_template() for one in (node, following)):
        return True
    device, then = node.get_device(), following.get_device()
    if isinstance(node, NopKernelSchedulerNode):
        return False
    return device != then or device is None or device.type != "cpu"


class _Reader:
    """Reads a graph that Inductor has scheduled: kernels and storages."""

    def __init__(self, graph: Any, nodes: Sequence[Any], given: Sequence[Given | None]) -> None:
        self._graph = graph
        self._nodes = nodes
        self._scheduler = graph.scheduler
        self._given = dict(zip(graph.graph_inputs, given, strict=False))
        self._held = _held(one for one in given if one is not None and one.lasts)
        self._row = {
            buffer.get_name(): row
            for row, node in enumerate(nodes)
            for buffer in node.get_outputs()
        }
        self._reused: dict[str, str] = {}
        self._roots: dict[str, frozenset[str]] = {}

    def graph(self, *, guess: bool) -> Graph:
        """Kernels in their order. `guess`: the code is not yet written, so that which buffers are
        made in place of others is not known, and which are not made at all only likely."""
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
            # A tuple holds its elements until all of them are taken out.
            taken = {self._row[name] for name in parts if name in self._row}
            for root in {*self._own(parts), *self._own([tuple_of])}:
                makers.setdefault(root, set()).add(self._row[tuple_of])
                users.setdefault(root, set()).update(taken)
        return self._columns(bytes_of, makers, users)

    def returned(self) -> list[Given | None]:
        """After `graph`: what each output lies in."""
        found: list[Given | None] = []
        for output in self._graph.graph_outputs:
            name = _name_of(output)
            if name is None:
                found.append(None)
                continue
            roots = sorted(self._root(name))
            known = [self._given.get(root) for root in roots]
            held = [one for one in known if one is not None]
            made = [root for root, one in zip(roots, known, strict=True) if one is None]
            total = sum(one.bytes for one in held) + sum(map(self._size, made))
            first = held[0].storage if held else roots[0]
            found.append(Given(first, total, bool(held) and held[0].lasts))
        return found

    def _columns(
        self, bytes_of: dict[str, int], makers: dict[str, set[int]], users: dict[str, set[int]]
    ) -> Graph:
        nodes, lasting = self._nodes, self._lasting()
        before = self._before()
        inputs: dict[str, tuple[int, set[int]]] = {}
        for name, one in self._given.items():
            if one is not None and not one.lasts:
                _, rows = inputs.setdefault(one.storage, (one.bytes, set()))
                mine = users.get(name, set()) | makers.get(name, set())
                rows |= mine
                if not mine or name in lasting:
                    rows.add(len(nodes))  # the code does not delete what it does not use
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
            scratch=np.array([sum(map(_scratch, node.get_nodes())) for node in nodes], np.int64),
            before_start=before_start,
            before=before_rows,
            bytes=np.array([size for _, size, *_ in values], np.int64),
            maker=np.array([maker for _, _, maker, *_ in values], np.int64),
            lasts=np.array([lasts for *_, lasts, _ in values], np.bool_),
            users_start=users_start,
            users=user_rows,
            base_bytes=self._held + self._constants(),
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
        """The buffers or inputs in whose memory a buffer lies."""
        if name not in self._roots:
            self._roots[name] = frozenset({name})  # of what is its own alias
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
            raise _UnknownSizeError(str(elements)) from error

    def _unused(self, buffer: Any) -> list[Any]:
        """Elements of an operator's result that nobody takes: in memory as long as the result."""
        if not isinstance(buffer.layout, ir.MultiOutputLayout):
            return []
        outputs = [one for one in getattr(buffer, "outputs", ()) if isinstance(one, ir.MultiOutput)]
        return [one for one in outputs if one.get_name() not in self._row]

    def _parts(self) -> dict[str, list[str]]:
        """By the name of a result of several tensors: the names of those."""
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
        """Buffers that live within one kernel."""
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
        names = (_name_of(output) for output in self._graph.graph_outputs)
        return {root for name in names if name is not None for root in self._root(name)}

    def _constants(self) -> int:
        return sum(one.untyped_storage().nbytes() for one in self._graph.constants.values())


def _name_of(output: Any) -> str | None:
    if isinstance(output, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)):
        return None
    return str(output.get_name())


def _strides(output: Any) -> tuple[int, ...] | None:
    if _name_of(output) is None or not output.has_tensor_output():
        return None
    return tuple(map(int, output.get_layout().stride))


def _chains(node: Any) -> Iterator[str]:
    for one in node.get_nodes():
        operator = getattr(one.node, "op_overload", None)
        if isinstance(operator, torch._ops.OpOverload):
            yield from chains_of(operator)


def _scratch(node: Any) -> int:
    """Of operators that say what they ask for and free while they run."""
    operator = getattr(node.node, "op_overload", None)
    tell = SCRATCH.get(operator) if operator is not None else None
    return 0 if tell is None else tell(node.node.constant_args)


SCRATCH: dict[Any, Callable[[Sequence[Any]], int]] = {}
"""Bytes by what an operator is called with, tensors left out."""


def _reuses(lines: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Buffers, and the ones whose memory they take over."""
    for line in lines:
        old, new = getattr(line, "node", None), getattr(line, "reused_as", None)
        if old is not None and new is not None:
            yield new.get_name(), old.get_name()


def given_of(inputs: Sequence[Any], names: Sequence[str], *, lasts: bool) -> list[Given | None]:
    """Inputs as they are, each with memory of its own."""
    return [
        Given(name, int(one.untyped_storage().nbytes()), lasts)
        if isinstance(one, torch.Tensor)
        else None
        for one, name in zip(inputs, names, strict=True)
    ]
