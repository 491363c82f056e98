"""A whole training step in Inductor's code: forward, and backward with each parameter's update.

The code of backward calls an operator of memplan's for each gradient (`memplan::take_gradients`),
which runs the optimizer's own code for that parameter; small parameters share one. To Inductor it
is an operator that writes the parameter, so that whoever reads that runs before; the gradient is
freed after it.
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

from memplan.runtime.graph.compile import Budget
from memplan.runtime.graph.fused import PARAMETER, Memory, Part, Parts, placed
from memplan.runtime.graph.inductor import compiled, uncached
from memplan.runtime.graph.inductor_buffers import SCRATCH, Given
from memplan.runtime.graph.joint import (
    Joint,
    LossGradient,
    copied,
    forward_alone,
    is_tangent,
    lies_as,
    loss_gradient,
    returned,
)
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.update_nodes import TakeGradient
from memplan.runtime.graph.updates import Updates

_SMALL = 2**14
"""Elements of a parameter: a call of its own costs more than its update."""
_TOGETHER = 1 / 256
"""Of all trained parameters' bytes: what is updated in one call, whose gradients are all there."""

_takers: WeakValueDictionary[int, _Take] = WeakValueDictionary()
_library = torch.library.Library("memplan", "FRAGMENT")
_library.define(
    "take_gradients(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] views, int taker)"
    " -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def _take(parameters: Any, gradients: Any, _views: Any, taker: int) -> None:
    _takers[taker](parameters, gradients)


def _take_nothing(*_args: Any) -> None:
    """Of tensors without memory."""


_library.impl("take_gradients", _take, "CompositeExplicitAutograd")
_library.impl("take_gradients", _take_nothing, "Meta")
_TAKE = torch.ops.memplan.take_gradients.default
SCRATCH[_TAKE] = lambda call: _takers[call.constant_args[-1]].scratch_bytes(call)


class _Take:
    """Takes gradients in Inductor's memory, which is used again as soon as this returns."""

    def __init__(self, updates: Updates, parameters: Sequence[torch.Tensor]) -> None:
        self._updates = updates
        self.parameters = parameters
        """Until the code is there."""
        _takers[id(self)] = self

    def __call__(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        updates = self._updates
        for parameter, gradient in zip(parameters, gradients, strict=True):
            stays = not (updates.in_graph and updates.trains(parameter))
            alike = gradient.stride() == parameter.stride() or updates.in_pieces(parameter)
            TakeGradient(updates, stays or not alike).hold(parameter, gradient)
        if updates.in_graph:
            updates.update(*parameters)

    def scratch_bytes(self, call: Any) -> int:
        """Of Inductor's call, whose gradients lie as it has them."""
        many = len(self.parameters)
        gradients = call.inputs[many : 2 * many]
        pairs = zip(self.parameters, gradients, strict=True)
        return sum(self._updates.scratch_bytes(one, of.get_stride()) for one, of in pairs)


def fused_step(module: fx.GraphModule, primals: Sequence[Any], parts: StepParts) -> Any:
    """What runs a step, as PyTorch's compiler takes it. Raises InfeasibleError for a budget that
    cannot be met, UsageError for one of a graph of which not all is known."""
    # PyTorch takes an LSTM whose input needs no gradient for inference, and traces oneDNN's kernel
    # of that, whose backward fails.
    lstm = mock.patch.object(decompositions, "mkldnn_one_layer_lstm", decompositions.one_layer_lstm)
    with uncached(), config.patch(custom_partitioner_fn=parts), lstm:
        return compile_fx(module, primals, inner_compile=parts.compile)


class StepParts(Parts):
    """Forward and backward of a step, and what runs them one after the other."""

    def __init__(
        self,
        primals: Sequence[Any],
        updates: Updates,
        scaler: torch.amp.GradScaler | None,
        *,
        keep: bool,
        base: Sequence[int],
        behind_bytes: int,
        budget: Budget,
        deadline_seconds: float,
        refuse: Callable[[fx.GraphModule, int], None],
        wrap: Callable[[StepParts], Callable[[list[Any]], list[Any]]],
        without_gradient: Callable[[], Any],
    ) -> None:
        """`keep`: gradients stay. `base`: optimizer state, and gradients of earlier calls.
        `behind_bytes`: what the optimizers' steps ask for where they come when backward has ended.
        `refuse` is told the joint graph, and how many results forward has, and raises where it is
        not the step; `wrap` gives what PyTorch is to call; `without_gradient` raises for a graph
        that has no backward."""
        super().__init__(budget, deadline_seconds)
        self._updates = updates
        self._scaler = scaler
        self._keep = keep
        self._base = base
        self._behind_bytes = behind_bytes
        self._refuse_graph = refuse
        self._wrap = wrap
        self._without_gradient = without_gradient
        self._parameters = {place: one for place, one in enumerate(primals) if _trains(one)}
        """Until the code is there."""
        self._trained = tuple(self._parameters)
        self._parts: tuple[fx.GraphModule, fx.GraphModule] | None = None
        self._primals: list[fx.Node] = []
        """The joint graph's."""
        self._takers: dict[tuple[int, ...], _Take] = {}
        """By the places of the parameters among the primals."""
        self._extra: list[int] = []
        """Places of primals that backward is given beside what forward saved."""
        self._start: LossGradient | None = None
        self._runs: tuple[Any, Any] | None = None
        self._written: list[str] = []
        self.kernels = 0
        self.calls = 0

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._refuse_graph(gm, kwargs["num_fwd_outputs"])
        places = gm.graph.find_nodes(op="placeholder")
        self._primals = [one for one in places if not is_tangent(one)]
        self._start = LossGradient(loss_gradient(gm), self._scaler)
        gradients = len(returned(gm)) - kwargs["num_fwd_outputs"]
        self._parts = forward, backward = super().__call__(gm, joint_inputs, **kwargs)
        self._written = [one.name for one in _written(forward)]
        assert self._results is not None
        return forward_alone(copied(forward), backward, self._results, gradients)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if options.get("is_backward"):
            return _never
        if self._parts is None:
            self._without_gradient()
        if self._runs is None:
            self._compile_parts(module, options)
        return self._wrap(self)

    def _compile_parts(self, module: fx.GraphModule, options: dict[str, Any]) -> None:
        assert self._parts is not None
        # An optimizer's numbers are others in each step, which a CUDA graph would not see.
        options["cudagraphs"] = type(options["cudagraphs"])(False)
        shown = module.graph.output_node().meta.get("user_visible_output_idxs", ())
        memory, runs = self._no_memory(self._results), []
        for part, backward in zip(self._parts, (False, True), strict=True):
            if backward:
                self._complete(part, memory)
                self._extra = self._places_of(part)
            inputs = memory.as_they_lie(part)
            part.graph.output_node().meta["user_visible_output_idxs"] = [] if backward else shown
            about = Part(part, inputs)
            given = memory.given(about, backward=backward)
            mine = {
                **options,
                "is_backward": backward,
                "static_input_idxs": options["static_input_idxs"]
                if not backward
                else [place for place, one in enumerate(given) if one is not None and one.lasts],
            }
            with _told(given if backward else ()):
                run, kernels = compiled(
                    part,
                    inputs,
                    given,
                    beside=memory.beside(given),
                    deadline_seconds=self._seconds,
                    **mine,
                )
            runs.append(run)
            if kernels is None:
                self._refuse("it has sizes that are not known")
                continue
            self._promise(memory.peak(about, given, kernels, backward=backward), kernels)
            self.kernels += kernels.calls
        self._runs = runs[0], runs[1]
        self._parts = None
        for taker in self._takers.values():
            taker.parameters = ()
        self._parameters.clear()
        self._primals.clear()

    def _cut(self, joint: Joint, module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = super()._cut(joint, module)
        _take_inputs(forward, backward, joint.results)
        return forward, backward

    def _no_memory(self, results: int | None) -> Memory:
        return Memory(results, self._base, self._behind_bytes)

    def _complete(self, backward: fx.GraphModule, memory: Memory) -> None:
        """Gradients are taken by backward itself, which returns nothing.

        What forward saved of a parameter is read before that is updated: to Inductor, whatever lies
        in its memory is written, too.
        """
        if self._keep:
            return
        graph, output = backward.graph, backward.graph.output_node()
        places = list(graph.find_nodes(op="placeholder"))
        views: dict[str | None, list[fx.Node]] = {}
        for node in places:
            views.setdefault(memory.lie_in(node.name), []).append(node)
        known = {node.name: node for node in places}
        last = places[-1]
        gradients = dict(enumerate(returned(backward)))
        for together in self._together(gradients):
            written, others = [], []
            for place in together:
                name = self._primals[place].name
                if PARAMETER + name not in known:
                    last = placed(PARAMETER + name, self._primals[place], last)
                    known[PARAMETER + name] = last
                written.append(known[PARAMETER + name])
                others += [one for one in views.get(name, []) if one is not written[-1]]
            taker = self._takers.get(together)
            if taker is None:
                mine = [self._parameters[place] for place in together]
                taker = self._takers[together] = _Take(self._updates, mine)
            with graph.inserting_before(output):
                given = written, [gradients[place] for place in together], others, id(taker)
                graph.call_function(_TAKE, given).meta["val"] = None
        output.args = ((),)
        backward.recompile()

    def _places_of(self, backward: fx.GraphModule) -> list[int]:
        """Of primals that are inputs of backward."""
        place = {PARAMETER + node.name: number for number, node in enumerate(self._primals)}
        names = (node.name for node in backward.graph.find_nodes(op="placeholder"))
        return [place[name] for name in names if name in place]

    def _together(self, gradients: dict[int, Any]) -> list[tuple[int, ...]]:
        """Places of parameters whose gradients are taken in one call."""
        sizes = {
            place: parameter.numel() * parameter.element_size()
            for place, parameter in self._parameters.items()
            if isinstance(gradients.get(place), fx.Node)
        }
        left, small = sum(sizes.values()) * _TOGETHER, []
        for place in sorted(sizes, key=sizes.__getitem__):
            left -= sizes[place]
            parameter = self._parameters[place]
            whole = lies_as(gradients[place], parameter)  # not a part that holds the rest
            if left >= 0 and whole and parameter.numel() <= _SMALL:
                small.append(place)
        rest: list[tuple[int, ...]] = [(place,) for place in sizes if place not in small]
        return [*rest, tuple(small)] if small else rest

    # The step

    def run(self, primals: list[Any]) -> list[Any]:
        """Forward's results. Empties the list, so that nothing but its owners holds an input."""
        assert self._runs is not None and self._results is not None and self._start is not None
        self.calls += 1
        forward, backward = self._runs
        trained = {place: primals[place] for place in self._trained}
        extra = [primals[place] for place in self._extra]
        given = list(primals)
        primals.clear()
        made = list(forward(given))
        results = made[: self._results]
        # Numbers that forward saves are its last outputs, and backward's first inputs.
        saved = sorted(made[self._results :], key=lambda one: isinstance(one, torch.Tensor))
        made = [*saved, self._start(), *extra]
        saved.clear()
        extra.clear()
        self._updates.begin_in_pieces(trained.values())
        with torch._C._DisableAutocast():
            gradients = backward(made)
        if self._keep:
            self._hand_over(trained, list(gradients))
        return results

    def _hand_over(self, trained: dict[int, Any], gradients: list[Any]) -> None:
        """Gradients that stay. None of them may be a part of another."""
        seen: set[int] = set()
        for place, parameter in trained.items():
            gradient, gradients[place] = gradients[place], None
            if gradient is not None:
                storage = gradient.untyped_storage()
                shared = storage.data_ptr() in seen
                seen.add(storage.data_ptr())
                whole = storage.nbytes() == parameter.numel() * parameter.element_size()
                alike = gradient.stride() == parameter.stride()
                TakeGradient(self._updates, shared or not (whole and alike))(parameter, gradient)

    def written_until(self, _error: BaseException) -> list[str]:
        """Inputs other than trained parameters that the step had begun to write, by name."""
        return self._written

    def report(self) -> ProgramReport:
        peak = self.promised_bytes
        again = len(self.recomputed)
        high = self.high_bytes
        return ProgramReport(
            self.kernels, peak, peak, high, 0, 0.0, recomputed=again, calls=self.calls
        )


@contextmanager
def _told(given: Sequence[Given | None]) -> Iterator[None]:
    """While Inductor compiles a part that AOTAutograd does not know: which of its inputs it may
    write into, because nobody else holds them."""
    context: Any = TracingContext.get()
    storages = [one.storage for one in given if one is not None]
    own = [
        place
        for place, one in enumerate(given)
        if one is not None and not one.lasts and storages.count(one.storage) == 1
    ]
    with (
        mock.patch.object(context.fw_metadata, "bw_donated_idxs", own),
        mock.patch.object(context, "output_strides", None),
    ):
        yield


def _take_inputs(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Have backward be given forward's inputs, where forward would save them.

    What Inductor's forward saves of a weight may be a copy that lies as convolutions want it.
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
        last = placed(PARAMETER + node.name, node, last)
        places[node.name].replace_all_uses_with(last)
        backward.graph.erase_node(places[node.name])
    backward.recompile()


def _written(forward: fx.GraphModule) -> set[fx.Node]:
    """Inputs that forward writes, or may write."""
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


def _never(*_args: Any) -> Any:
    raise RuntimeError("the step has run its backward pass already")
