"""PyTorch Inductor's code for a graph, in our order, and the bytes that it holds.

Inductor fuses a graph's operators into kernels; then it sorts the kernels for a low peak. Here the
order that it chose is the first candidate, and gives way to one with a lower peak. Which buffers
the code makes, reuses and frees is read off Inductor's own lists after the code is written, so that
the peak is that of the code and not of the graph.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import fallback_handler
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V

from memplan.order.allocated import allocated_peak
from memplan.order.baselines import Candidate
from memplan.order.bound import cut_bound
from memplan.order.evaluate import lifetimes, peak, program_order
from memplan.order.solve import solve
from memplan.order.updates import early_updates
from memplan.runtime.graph.inductor_buffers import (
    BufferReader,
    Given,
    UnknownSizeError,
    held_bytes,
    name_of,
)
from memplan.runtime.graph.joint import returned
from memplan.types.alloc_conf import conf_in
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.trace import I64

_NEARLY = 1.01
"""Times the least peak that is possible: a lower one is not worth the seconds of a search."""


_CLONE = fallback_handler(torch.ops.aten.clone.default, add_to_fallback_set=False)


@dataclass(frozen=True, eq=False)
class Kernels:
    """What Inductor made of a graph."""

    peak_bytes: int
    """With all inputs, and nothing else of the caller's. On CUDA of whole blocks, with what kernels
    ask for while they run."""
    returned: list[Given | None]
    """Of each output, what it lies in; None where it is no tensor."""
    strides: list[tuple[int, ...] | None]
    """Of each output: Inductor chooses those that no user sees."""
    calls: int = 0
    """Of kernels."""
    high_bytes: int = 0
    """Above the peak: with the largest workspaces that libraries may choose."""
    workspace_bytes: int = 0
    """Kept by libraries; not in the peak."""


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
    beside: Sequence[int],
    deadline_seconds: float,
    look: bool = False,
    **options: Any,
) -> tuple[Any, Kernels | None]:
    """Inductor's code for a graph, which it takes over, and what that needs: None where sizes are
    not known before it runs.

    `given`: of each input, None for what is no tensor. `beside`: blocks that the caller holds
    besides; how the allocator hands out others may depend on them. `look`: no code, nor the time
    that a C++ or GPU compiler takes. `options`: as `compile_fx_inner` takes them.
    """
    _multiply_before_adding(module.graph)
    run = None
    with _watched(given, beside, deadline_seconds, look=look) as seen, suppress(_LookedError):
        run = compile_fx_inner(module, inputs, **options)
    return run, seen[0] if seen else _without_kernels(module, given)


def _multiply_before_adding(graph: fx.Graph) -> None:
    """Where Inductor makes one kernel of a matrix product and an addition, it forgets the factor
    of the addition (`alpha`, PyTorch 2.13). A codebook that moves is written so."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        one, other = node.args
        factor = node.kwargs.get("alpha")
        if isinstance(factor, (int, float)) and isinstance(other, fx.Node):
            with graph.inserting_before(node):
                scaled = graph.call_function(torch.ops.aten.mul.Tensor, (other, factor))
            scaled.meta = {**node.meta, "val": other.meta["val"] * factor}
            node.args, node.kwargs = (one, scaled), {}


class _LookedError(BaseException):
    """Not caught by Inductor."""


def _without_kernels(module: fx.GraphModule, given: Sequence[Given | None]) -> Kernels:
    """Of a graph that calls nothing."""
    of = dict(zip(module.graph.find_nodes(op="placeholder"), given, strict=True))
    found = [of.get(one) for one in returned(module)]
    return Kernels(held_bytes(given), found, [None] * len(found))


@contextmanager
def _watched(
    given: Sequence[Given | None], beside: Sequence[int], deadline_seconds: float, *, look: bool
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
            found = BufferReader(V.graph, theirs, given if whole else ()).graph(guess=True)
        except UnknownSizeError:
            return theirs
        if whole:
            return _ordered(found, theirs, deadline_seconds)
        nested.append(_peak(found, program_order(found), theirs))
        return theirs

    def codegen(graph: Any) -> Any:
        result = write(graph)
        if _is_whole(graph):
            with V.set_graph_handler(graph):
                seen[:] = [_kernels(graph, given, beside, max(nested, default=0))]
            if look:
                raise _LookedError
        return result

    lay_out = ir.ExternKernel.require_strides

    def require(x: Any, order: Any = None, **more: Any) -> Any:
        return _copied_whole(x, order) or lay_out(x, order, **more)

    with (
        mock.patch.object(ir.ExternKernel, "require_strides", staticmethod(require)),
        mock.patch.object(memory, "reorder_for_peak_memory", reorder),
        mock.patch.object(GraphLowering, "codegen", codegen),
        config.patch(reorder_for_peak_memory=True),
        uncached(),
    ):
        yield seen


def _copied_whole(tensor: Any, order: Any) -> Any:
    """A copy with channels last of what the graph is given, a weight of a convolution: by PyTorch's
    own kernel, where Inductor would have one made for each. None for any other layout."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    orders = {4: ir.NHWC_STRIDE_ORDER, 5: ir.NHWDC_STRIDE_ORDER}
    given = isinstance(tensor, ir.TensorBox) and isinstance(tensor.data, ir.StorageBox)
    if order is None or not given or not isinstance(tensor.data.data, ir.InputBuffer):
        return None
    wanted = orders.get(len(order)) == list(order) and tensor.get_numel() not in (0, 1)
    if not wanted or tensor.get_layout().is_stride_ordered(order):
        return None
    return _CLONE(tensor, memory_format=formats[len(order)])


def _kernels(
    graph: Any, given: Sequence[Given | None], beside: Sequence[int], nested: int
) -> Kernels | None:
    """`nested`: the peak of a branch or loop, which runs while an operator of the graph does."""
    read = BufferReader(graph, graph.scheduler.nodes, given)
    try:
        made = read.graph(guess=False)
        order, nodes = program_order(made), graph.scheduler.nodes
        most = _peak(made, order, nodes)
        high = _peak(replace(made, scratch=read.scratch_high()), order, nodes) - most
        if any(device is not None and device.type == "cuda" for device in map(_device, nodes)):
            blocks = [*read.held, *beside]
            most = allocated_peak(made, order, blocks, conf_in(os.environ)) - sum(beside)
        return Kernels(
            peak_bytes=most + nested,
            returned=read.returned(),
            strides=[_strides(one) for one in graph.graph_outputs],
            calls=len(nodes),
            high_bytes=high,
            workspace_bytes=sum(read.workspaces()),
        )
    except UnknownSizeError:
        return None


def _device(node: Any) -> torch.device | None:
    device: torch.device | None = node.get_device()
    return device


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
        found = solve(graph, deadline=Deadline(deadline_seconds), baselines=lambda: [theirs])
        if found.best is not None and found.best.peak_bytes < peak(graph, order):
            order = found.best.order
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


def _strides(output: Any) -> tuple[int, ...] | None:
    if name_of(output) is None or not output.has_tensor_output():
        return None
    strides = output.get_layout().stride
    try:
        return tuple(map(int, strides))
    except TypeError as error:
        raise UnknownSizeError(str(strides)) from error
