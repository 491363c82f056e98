"""The ops of a recorded step as nodes, and what each reads, writes and makes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memplan.runtime.compiled.lines import refused_at, user_line
from memplan.runtime.compiled.nested import tensors_in
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.op_limits import PACK, SHAPE_ONLY, flops_of
from memplan.runtime.compiled.program import FACTS, Facts
from memplan.runtime.compiled.recording.step_graph import StepGraph
from memplan.runtime.compiled.recording.tensors import Tensors, check_plain
from memplan.runtime.compiled.split import pieces
from memplan.runtime.tape.replayable import Traits


class Call(NamedTuple):
    """An op and its arguments, as they are and as nodes."""

    func: Any
    traits: Traits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mapped: list[Any]
    mapped_kwargs: dict[str, Any]
    chains: tuple[str, ...]


class Operators:
    """Adds ops that have run to the graph."""

    def __init__(self, graph: StepGraph, tensors: Tensors) -> None:
        self.went_backward = False
        self._graph = graph
        self._tensors = tensors
        self._known = tensors.known

    def add(self, call: Call, result: Any) -> None:
        """An op that has run and given `result`."""
        func, traits = call.func, call.traits
        outputs = list(tensors_in(result))
        for output in outputs:
            check_plain(output)
        if not outputs and not traits.written and not call.chains:
            if result is None and any(True for _ in tensors_in(call.args)):
                raise NotCapturable(
                    f"{traits.name} returns nothing and says of no tensor that it writes it",
                    refused_at(),
                )
            return  # an answer about shapes, types or devices
        new = [t for t in outputs if t.untyped_storage()._cdata not in self._known.live]
        if not new and not traits.written and traits.statistics is None and not call.chains:
            self._alias(call, outputs, result)
            return
        if torch.Tag.inplace_view in func.tags:
            self._moved(call.args)
            return
        parts = pieces(func, call.args, call.mapped, call.mapped_kwargs)
        if parts is None:
            self._effect(call, (call.mapped, call.mapped_kwargs), result)
            return
        for number, part in enumerate(parts):
            self._effect(call, part, [outputs[number]] if outputs else None, split=True)

    def _effect(
        self, call: Call, mapped: tuple[list[Any], dict[str, Any]], result: Any, split: bool = False
    ) -> None:
        """An op that makes or writes something."""
        args, kwargs = mapped
        func, traits = call.func, call.traits
        used = self._known.of_nodes((args, kwargs))
        written = self._written(traits, args, kwargs)
        like = func._opname in SHAPE_ONLY
        fixed = not call.chains and self._known.is_fixed((args, kwargs), like)
        self._check_sizes(call)
        node = self._graph.call(func, tuple(args), kwargs, effect=True)
        made = self._tensors.register(node, result, traits.name)
        if func is PACK and self._known.is_fixed(args[1]):
            self._known.fixed.update(made[1:])  # how many sequences there are at each place
        if fixed:
            self._known.fixed.update(made)
        else:
            self._known.fixed.difference_update(written)
        backward = torch._C._current_graph_task_id() != -1
        self.went_backward |= backward
        node.meta[FACTS] = Facts(
            reads=() if like else used,
            writes=written,
            makes=made,
            uses=used,
            chains=call.chains,
            source=user_line(),
            backward=backward,
            update=self._graph.updating > 0,
            grad_mode=torch.is_grad_enabled(),
            flops=0 if split else flops_of(func, call.args, call.kwargs, result),
            splits=split,
        )

    def _check_sizes(self, call: Call) -> None:
        """Whether what an op has written is as long as before: `out=` may make it longer."""
        for tensor in tensors_in((call.args, call.kwargs)) if call.traits.written else ():
            storage = tensor.untyped_storage()
            known = self._known.live.get(storage._cdata)
            if known is not None and self._known.storages[known.index].bytes != storage.nbytes():
                raise NotCapturable("a tensor whose storage is resized", refused_at())

    def _alias(self, call: Call, outputs: list[torch.Tensor], result: Any) -> None:
        """An op that only makes views: a node where there is none for that view yet."""
        if all(self._known.has(tensor) for tensor in outputs):
            return
        node = self._graph.free(call.func, tuple(call.mapped), call.mapped_kwargs)
        self._tensors.register(node, result, "")

    def _moved(self, args: tuple[Any, ...]) -> None:
        """An op that changes how a tensor lies on its storage and nothing in it, as `t_`."""
        for tensor in tensors_in(args):
            self._tensors.node_of(tensor)

    def _written(self, traits: Traits, args: list[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
        found = []
        for position, name in traits.written:
            found.append(args[position] if position < len(args) else kwargs.get(name))
        if traits.statistics is not None:
            mean, variance, flag = traits.statistics
            if flag >= len(args) or args[flag]:
                found += [args[position] for position in (mean, variance) if position < len(args)]
        return self._known.of_nodes(found)
