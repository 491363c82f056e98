"""A whole training step in fused kernels: forward, and backward with each parameter's update.

For each gradient, backward's code calls memplan's operator `memplan::take_gradients`, which runs
the optimizer's own code for that parameter; small parameters share a call. The operator is declared
to write the parameter. So Inductor runs it after all kernels that read the parameter, and frees the
gradient after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._decomp import decompositions
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from memplan.runtime.graph.fused import (
    PARAMETER,
    CallerMemory,
    FusedParts,
    PartInterface,
    add_placeholder,
)
from memplan.runtime.graph.inductor import CompiledKernels, uncached
from memplan.runtime.graph.inductor_buffers import SCRATCH, InputBuffer
from memplan.runtime.graph.joint import (
    Joint,
    LossGradient,
    copied,
    forward_alone,
    is_tangent,
    loss_gradient,
    returned,
    run_once,
    same_layout,
)
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.setup import Setup
from memplan.runtime.graph.update_nodes import TakeGradient
from memplan.runtime.graph.updates import UpdatePlan, Updates

_SMALL_ELEMENTS = 2**14
"""Elements of a parameter for which a call of its own costs more than its update."""
_BATCHED_SHARE = 1 / 256
"""The share of all trained parameters' bytes that one call for small parameters may update. All
gradients of the call are alive at once."""

_takers: WeakValueDictionary[int, _GradientTaker] = WeakValueDictionary()
_library = torch.library.Library("memplan", "FRAGMENT")
_library.define(
    "take_gradients(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] views, int taker)"
    " -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def _take(parameters: Any, gradients: Any, _views: Any, taker: int) -> None:
    _takers[taker](parameters, gradients)


def _take_nothing(*_args: Any) -> None:
    """The operator on meta tensors."""


_library.impl("take_gradients", _take, "CompositeExplicitAutograd")
_library.impl("take_gradients", _take_nothing, "Meta")
_TAKE_GRADIENTS = torch.ops.memplan.take_gradients.default
SCRATCH[_TAKE_GRADIENTS] = lambda call: _takers[call.constant_args[-1]].scratch_bytes(call)


class _GradientTaker:
    """Does one call of `memplan::take_gradients`. The gradients' memory is reused afterwards."""

    def __init__(self, updates: Updates, parameters: Sequence[torch.Tensor]) -> None:
        self._updates = updates
        self.parameters = parameters
        """Empty once the code is compiled."""
        _takers[id(self)] = self

    def __call__(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        updates = self._updates
        for parameter, gradient in zip(parameters, gradients, strict=True):
            stays = not (updates.in_graph and updates.trains(parameter))
            alike = gradient.stride() == parameter.stride() or id(parameter) in updates.class_of
            TakeGradient(updates, stays or not alike).hold(parameter, gradient)
        if updates.in_graph:
            updates.update(*parameters)

    def scratch_bytes(self, call: Any) -> int:
        """Bytes that the updates of a call allocate and free. `call` is Inductor's node, which has
        the strides of the gradients."""
        many = len(self.parameters)
        gradients = call.inputs[many : 2 * many]
        pairs = zip(self.parameters, gradients, strict=True)
        return sum(self._updates.scratch_bytes(one, of.get_stride()) for one, of in pairs)


def fused_step(module: fx.GraphModule, primals: Sequence[Any], parts: FusedStepParts) -> Any:
    """Compile a step; the result is what a backend of PyTorch's compiler returns.

    Raises InfeasibleError where the budget cannot be met, and UsageError for a budget of a graph
    with unknown sizes or operators.
    """
    # For an LSTM whose input needs no gradient, PyTorch traces oneDNN's kernel for inference, whose
    # backward fails.
    lstm = mock.patch.object(decompositions, "mkldnn_one_layer_lstm", decompositions.one_layer_lstm)
    with uncached(), config.patch(custom_partitioner_fn=parts), lstm:
        return compile_fx(module, primals, inner_compile=parts.compile)


class FusedStepParts(FusedParts):
    """Forward and backward of a step, run one after the other by one call (`run`)."""

    def __init__(
        self,
        primals: Sequence[Any],
        setup: Setup,
        *,
        refuse: Callable[[fx.GraphModule, int], None],
        wrap: Callable[[FusedStepParts], Callable[[list[Any]], list[Any]]],
        without_gradient: Callable[[], Any],
    ) -> None:
        """`refuse` gets the joint graph and the number of forward's results, and raises where the
        graph is not the step. `wrap` makes the function that PyTorch calls. `without_gradient`
        raises for a graph that has no backward."""
        super().__init__(setup.options.budget, setup.options.deadline_seconds)
        self._updates, self._scaler = setup.updates, setup.scaler
        self._plan = UpdatePlan(setup.updates)
        self._keep_gradients = setup.keeps_gradients()
        self._always = setup.resident_blocks(), setup.scratch_after_bytes()
        self._check_graph = refuse
        self._wrap = wrap
        self._without_gradient = without_gradient
        self._parameters = {place: one for place, one in enumerate(primals) if _trains(one)}
        """Parameters by place among the primals; empty once the code is compiled."""
        self._trained = tuple(self._parameters)
        self._parts: tuple[fx.GraphModule, fx.GraphModule] | None = None
        self._primal_nodes: list[fx.Node] = []
        """Placeholders of the joint graph for its primals."""
        self._takers: dict[tuple[int, ...], _GradientTaker] = {}
        """Takers by the places of their parameters among the primals."""
        self._extra_primals: list[int] = []
        """Places of primals that are inputs of backward, behind the saved values."""
        self._loss_gradient: LossGradient | None = None
        self._code: tuple[Any, Any] | None = None
        self._written: list[str] = []
        self.kernels = 0
        self.calls = 0

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._check_graph(gm, kwargs["num_fwd_outputs"])
        places = gm.graph.find_nodes(op="placeholder")
        self._primal_nodes = [one for one in places if not is_tangent(one)]
        self._loss_gradient = LossGradient(loss_gradient(gm), self._scaler)
        gradients = len(returned(gm)) - kwargs["num_fwd_outputs"]
        self._parts = forward, backward = super().__call__(gm, joint_inputs, **kwargs)
        self._written = [one.name for one in _written(forward)]
        assert self._results is not None
        return forward_alone(copied(forward), backward, self._results, gradients)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if options.get("is_backward"):
            return run_once
        if self._parts is None:
            self._without_gradient()
        if self._code is None:
            self._compile_parts(module, options)
        return self._wrap(self)

    def _compile_parts(self, module: fx.GraphModule, options: dict[str, Any]) -> None:
        assert self._parts is not None
        # A CUDA graph would repeat the optimizer's numbers of the step in which it was recorded.
        options["cudagraphs"] = type(options["cudagraphs"])(False)
        shown = module.graph.output_node().meta.get("user_visible_output_idxs", ())
        memory, runs = self._caller_memory(self._results), []
        for part, backward in zip(self._parts, (False, True), strict=True):
            if backward:
                self._finish_backward(part, memory)
                self._extra_primals = self._extra_places(part)
            inputs = memory.inputs_as_saved(part)
            part.graph.output_node().meta["user_visible_output_idxs"] = [] if backward else shown
            settings = {**options, "is_backward": backward}
            run, kernels, peak = self._compiled(part, inputs, memory, **settings)
            runs.append(run)
            if kernels is not None:
                self._promise(peak, kernels)
                self.kernels += kernels.calls
        self._code = runs[0], runs[1]
        self._parts = None
        for taker in self._takers.values():
            taker.parameters = ()
        self._parameters.clear()
        self._primal_nodes.clear()

    def _compiled(
        self, module: fx.GraphModule, inputs: Sequence[Any], memory: CallerMemory, **options: Any
    ) -> tuple[Any, CompiledKernels | None, int]:
        if options.get("dry_run"):
            return super()._compiled(module, inputs, memory, **options)
        buffers: list[InputBuffer | None] = []
        if options["is_backward"]:
            buffers = memory.input_buffers(PartInterface(module, inputs), backward=True)
            lasting = (place for place, one in enumerate(buffers) if one and one.outlives_graph)
            options["static_input_idxs"] = list(lasting)
        with _donating(buffers):
            return super()._compiled(module, inputs, memory, **options)

    def _split(self, joint: Joint, module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = super()._split(joint, module)
        _take_inputs(forward, backward, joint.results)
        return forward, backward

    def _finish_backward(self, backward: fx.GraphModule, memory: CallerMemory) -> None:
        """Let backward itself call `take_gradients`, and return nothing.

        Saved views of a parameter are arguments that the call is declared to write: so Inductor
        runs everything that reads them before the update.
        """
        if self._keep_gradients:
            return
        graph, output = backward.graph, backward.graph.output_node()
        places = list(graph.find_nodes(op="placeholder"))
        views: dict[str | None, list[fx.Node]] = {}
        for node in places:
            views.setdefault(memory.storage_of(node.name), []).append(node)
        known = {node.name: node for node in places}
        last = places[-1]
        gradients = dict(enumerate(returned(backward)))
        for batch in self._batches(gradients):
            written, others = [], []
            for place in batch:
                name = self._primal_nodes[place].name
                if PARAMETER + name not in known:
                    last = add_placeholder(PARAMETER + name, self._primal_nodes[place], last)
                    known[PARAMETER + name] = last
                written.append(known[PARAMETER + name])
                others += [one for one in views.get(name, []) if one is not written[-1]]
            taker = self._takers.get(batch)
            if taker is None:
                parameters = [self._parameters[place] for place in batch]
                taker = self._takers[batch] = _GradientTaker(self._updates, parameters)
            with graph.inserting_before(output):
                arguments = written, [gradients[place] for place in batch], others, id(taker)
                graph.call_function(_TAKE_GRADIENTS, arguments).meta["val"] = None
        output.args = ((),)
        backward.recompile()

    def _extra_places(self, backward: fx.GraphModule) -> list[int]:
        """Places of primals that are inputs of backward, in the order of these inputs."""
        place = {PARAMETER + node.name: number for number, node in enumerate(self._primal_nodes)}
        names = (node.name for node in backward.graph.find_nodes(op="placeholder"))
        return [place[name] for name in names if name in place]

    def _batches(self, gradients: dict[int, Any]) -> list[tuple[int, ...]]:
        """The places of the parameters of each call of `take_gradients`."""
        sizes = {
            place: parameter.numel() * parameter.element_size()
            for place, parameter in self._parameters.items()
            if isinstance(gradients.get(place), fx.Node)
        }
        left, small = sum(sizes.values()) * _BATCHED_SHARE, []
        for place in sorted(sizes, key=sizes.__getitem__):
            left -= sizes[place]
            parameter = self._parameters[place]
            whole = same_layout(gradients[place], parameter)  # a part would keep the rest alive
            if left >= 0 and whole and parameter.numel() <= _SMALL_ELEMENTS:
                small.append(place)
        rest: list[tuple[int, ...]] = [(place,) for place in sizes if place not in small]
        return [*rest, tuple(small)] if small else rest

    # The step

    def run(self, primals: list[Any]) -> list[Any]:
        """Run the step and return forward's results. `primals` is emptied, so that inputs are freed
        as soon as their owners release them."""
        assert self._code is not None and self._results is not None
        assert self._loss_gradient is not None
        self.calls += 1
        forward, backward = self._code
        trained = {place: primals[place] for place in self._trained}
        extra = [primals[place] for place in self._extra_primals]
        inputs = list(primals)
        primals.clear()
        outputs = list(forward(inputs))
        results = outputs[: self._results]
        # Saved numbers are the last outputs of forward and the first inputs of backward.
        saved = sorted(outputs[self._results :], key=lambda one: isinstance(one, torch.Tensor))
        inputs = [*saved, self._loss_gradient(), *extra]
        outputs.clear()
        saved.clear()
        extra.clear()
        self._plan.begin(trained.values())
        with torch._C._DisableAutocast():
            gradients = backward(inputs)
        if self._keep_gradients:
            self._store_gradients(trained, list(gradients))
        return results

    def _store_gradients(self, trained: dict[int, Any], gradients: list[Any]) -> None:
        """Put gradients into `.grad`, with a copy of those that share memory with another."""
        seen: set[int] = set()
        for place, parameter in trained.items():
            gradient, gradients[place] = gradients[place], None
            if gradient is not None:
                storage = gradient.untyped_storage()
                shared = storage.data_ptr() in seen
                seen.add(storage.data_ptr())
                whole = storage.nbytes() == parameter.numel() * parameter.element_size()
                alike = gradient.stride() == parameter.stride()
                TakeGradient(self._updates, shared or not (whole and alike))(parameter, [gradient])

    def written_until(self, _error: BaseException) -> list[str]:
        """Names of inputs, no trained parameters, that the step may have written."""
        return self._written

    def report(self) -> ProgramReport:
        peak = self.promised_bytes
        again = len(self.recomputed)
        high = self.high_bytes
        return ProgramReport(
            self.kernels, peak, peak, high, 0, 0.0, recomputed=again, calls=self.calls
        )


@contextmanager
def _donating(buffers: Sequence[InputBuffer | None]) -> Iterator[None]:
    """Inside, Inductor may reuse the memory of a part's inputs that nothing else holds. PyTorch
    only tells it so for parts that AOTAutograd made."""
    context: Any = TracingContext.get()
    storages = [one.storage for one in buffers if one is not None]
    own = [
        place
        for place, one in enumerate(buffers)
        if one is not None and not one.outlives_graph and storages.count(one.storage) == 1
    ]
    with (
        mock.patch.object(context.fw_metadata, "bw_donated_idxs", own),
        mock.patch.object(context, "output_strides", None),
    ):
        yield


def _take_inputs(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Pass forward's inputs to backward directly where forward would save them.

    What Inductor's forward saves of a weight may be a copy in another memory format.
    """
    written = _written(forward)
    outputs = returned(forward)
    saved: list[fx.Node] = list(outputs[results:])
    taken = [node for node in saved if node.op == "placeholder" and node not in written]
    kept = [node for node in saved if node not in taken]
    forward.graph.output_node().args = ((*outputs[:results], *kept),)
    forward.recompile()
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    last = next(reversed(places.values()))
    for node in taken:
        last = add_placeholder(PARAMETER + node.name, node, last)
        places[node.name].replace_all_uses_with(last)
        backward.graph.erase_node(places[node.name])
    backward.recompile()


def _written(forward: fx.GraphModule) -> set[fx.Node]:
    """Inputs that forward may write."""
    return {
        used
        for node in forward.graph.nodes
        if node.op == "call_function" and _writes(node.target)
        for used in node.all_input_nodes
        if used.op == "placeholder"
    }


def _writes(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return target is not operator.getitem


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
