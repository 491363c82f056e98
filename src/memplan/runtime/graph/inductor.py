"""Compiles a graph with PyTorch Inductor, with the kernels in memplan's order, and finds its peak.

Inductor fuses a graph's operators into kernels and sorts the kernels for a low peak. Its order is
kept unless memplan finds one with a lower peak. The peak is that of the generated code: which
buffers the code allocates, reuses and frees is read from Inductor's own lists once it is generated.
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
    InputBuffer,
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
"""No search is made for a peak of at most this factor times a lower bound."""


_CLONE = fallback_handler(torch.ops.aten.clone.default, add_to_fallback_set=False)


@dataclass(frozen=True, eq=False)
class CompiledKernels:
    """What is known of a graph's generated code."""

    peak_bytes: int
    """The peak with all inputs, and nothing else that the caller holds. On CUDA it counts whole
    blocks of the allocator and what kernels allocate while they run."""
    returned: list[InputBuffer | None]
    """The buffer of each output; None where it is no tensor."""
    strides: list[tuple[int, ...] | None]
    """The strides of each output. Inductor chooses those of outputs that no user sees."""
    calls: int = 0
    """Number of kernels."""
    high_bytes: int = 0
    """How much higher the peak is if libraries choose their largest workspaces."""
    workspace_bytes: int = 0
    """What libraries keep once they are used; not in the peak."""


def unavailable(devices: Iterable[torch.device]) -> str:
    """Why Inductor cannot make code for these devices; empty where it can."""
    return next(filter(None, map(_unavailable, sorted({device.type for device in devices}))), "")


@functools.cache
def _unavailable(device: str) -> str:
    if device == "cuda":
        # Asked of Inductor's module, where a capture without a GPU replaces the answer.
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
    """Inside, PyTorch's compiler does not use its caches of whole graphs, whose code may be in
    another order. It still uses its cache of compiled kernels."""
    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def compiled(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    buffers: Sequence[InputBuffer | None],
    *,
    resident: Sequence[int],
    deadline_seconds: float,
    dry_run: bool = False,
    **options: Any,
) -> tuple[Any, CompiledKernels | None]:
    """Compile a graph, which may be changed. Returns its code, and what is known of that: None
    where sizes are not known before it runs.

    `buffers`: the buffer of each input, None for what is no tensor. `resident`: blocks, in bytes,
    that the caller holds besides; the allocator's choices may depend on them. `dry_run`: return no
    code, which saves the time of a C++ or GPU compiler. `options`: those of `compile_fx_inner`.
    """
    _multiply_before_adding(module.graph)
    run = None
    with (
        _watched(buffers, resident, deadline_seconds, dry_run=dry_run) as seen,
        suppress(_DryRunError),
    ):
        run = compile_fx_inner(module, inputs, **options)
    return run, seen[0] if seen else _without_kernels(module, buffers)


def _multiply_before_adding(graph: fx.Graph) -> None:
    """Replace additions with a factor (`alpha`) by a product and a plain addition.

    Where PyTorch 2.13's Inductor makes one kernel of a matrix product and an addition, it ignores
    the factor. Moving averages, as of a codebook, are written that way.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        one, other = node.args
        factor = node.kwargs.get("alpha")
        if isinstance(factor, (int, float)) and isinstance(other, fx.Node):
            with graph.inserting_before(node):
                scaled = graph.call_function(torch.ops.aten.mul.Tensor, (other, factor))
            scaled.meta = {**node.meta, "val": other.meta["val"] * factor}
            node.args, node.kwargs = (one, scaled), {}


class _DryRunError(BaseException):
    """Ends Inductor's compilation before code is compiled; Inductor catches other exceptions."""


def _without_kernels(
    module: fx.GraphModule, buffers: Sequence[InputBuffer | None]
) -> CompiledKernels:
    """What is known of a graph that runs no kernel."""
    of = dict(zip(module.graph.find_nodes(op="placeholder"), buffers, strict=True))
    found = [of.get(one) for one in returned(module)]
    return CompiledKernels(held_bytes(buffers), found, [None] * len(found))


@contextmanager
def _watched(
    buffers: Sequence[InputBuffer | None],
    resident: Sequence[int],
    deadline_seconds: float,
    *,
    dry_run: bool,
) -> Iterator[list[CompiledKernels | None]]:
    """Inside, Inductor uses memplan's order. Then the list has what is known of the code."""
    seen: list[CompiledKernels | None] = []
    sort, write = memory.reorder_for_peak_memory, GraphLowering.codegen
    nested: list[int] = []

    def reorder(nodes: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = sort(nodes, *args, **kwargs)
        whole = _is_whole(V.graph)
        try:
            found = BufferReader(V.graph, theirs, buffers if whole else ()).graph(guess=True)
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
                seen[:] = [_kernels(graph, buffers, resident, max(nested, default=0))]
            if dry_run:
                raise _DryRunError
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
    """A channels-last copy of an input of the graph, such as a convolution's weight, by PyTorch's
    own kernel: Inductor would compile a kernel for each. None for any other layout."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    orders = {4: ir.NHWC_STRIDE_ORDER, 5: ir.NHWDC_STRIDE_ORDER}
    buffers = isinstance(tensor, ir.TensorBox) and isinstance(tensor.data, ir.StorageBox)
    if order is None or not buffers or not isinstance(tensor.data.data, ir.InputBuffer):
        return None
    wanted = orders.get(len(order)) == list(order) and tensor.get_numel() not in (0, 1)
    if not wanted or tensor.get_layout().is_stride_ordered(order):
        return None
    return _CLONE(tensor, memory_format=formats[len(order)])


def _kernels(
    graph: Any, buffers: Sequence[InputBuffer | None], resident: Sequence[int], nested: int
) -> CompiledKernels | None:
    """`nested`: the peak of the body of a branch or loop, which is an operator of the graph."""
    read = BufferReader(graph, graph.scheduler.nodes, buffers)
    try:
        made = read.graph(guess=False)
        order, nodes = program_order(made), graph.scheduler.nodes
        most = _peak(made, order, nodes)
        high = _peak(replace(made, scratch=read.scratch_high()), order, nodes) - most
        if any(device is not None and device.type == "cuda" for device in map(_device, nodes)):
            blocks = [*read.held, *resident]
            most = allocated_peak(made, order, blocks, conf_in(os.environ)) - sum(resident)
        return CompiledKernels(
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
    """Whether this is the graph itself, not the body of a branch or a loop."""
    return type(graph) is GraphLowering


def _ordered(graph: Graph, nodes: list[Any], deadline_seconds: float) -> list[Any]:
    """The nodes in the order with the lowest peak that is found; in Inductor's order where no other
    is better. There is no search where a peak is proved to be nearly the lowest."""
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
    """The peak of the code for the nodes in this order, in bytes.

    Consecutive CPU kernels become one call: all their buffers are allocated before it, and freed
    after it.
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
    """Whether two consecutive kernels become two calls, so that buffers are freed between them."""
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
