"""A parameter's gradient, taken as soon as it is there: accumulated, and used by the optimizer.

PyTorch's own optimizers treat each parameter by itself, so a step of one that knows a single
parameter gives the bits that a step of all gives; it is their own code that runs, with what their
groups say at that moment.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memplan.runtime.graph.arithmetic import (
    Arithmetic,
    arithmetic,
    as_in_a_step,
    one_tensor_at_a_time,
    scalars,
    without_memory,
)
from memplan.runtime.graph.meter import Meter, storage_bytes
from memplan.runtime.graph.pieces import Pointwise, pointwise
from memplan.runtime.graph.program import tensors
from memplan.runtime.one_update import alone, begin, each_by_itself, of_torch, plain_step, update

Optimizer = torch.optim.Optimizer
_MOST_LOOKED = 8
"""Times that pieces are looked for anew because the arithmetic of an update changed."""
_OF_NUMBERS = 16
"""Bytes of the tensors that Python's numbers become while an operator runs."""


class Updates:
    """The optimizers of a step, and which of them trains a parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.in_graph = False
        """Whether parameters are updated as soon as their gradients are there: of this call."""
        self.keep_gradients = False
        self.whole = False
        """Whether each update is to be run as a whole, by the optimizer."""
        self._listed: list[list[torch.Tensor]] | None = None
        """What the optimizers' states listed when this call began, if it runs in a graph."""
        self.done: set[int] = set()
        """Parameters that were updated in this call, by their ids."""
        self.ahead = False
        """Whether graphs are of the second step, where the first is another."""
        self._every: dict[int, list[tuple[Optimizer, int]]] = {}
        """Of a parameter's id: the optimizers that train it, each with the number of its group."""
        self._groups: dict[int, tuple[Optimizer, int]] = {}
        """The last of them; where updates are part of the graph, there is one."""
        self._classes: list[SameArithmetic] = []
        """Of the parameters whose arithmetic is part of the graph that is made."""
        self._first_only = False
        """Whether that graph has updates which are others once there is a state."""
        self._waiting: list[torch.Tensor] = []
        """Parameters whose gradients are there, and which a later update updates, too."""
        self._begun: list[tuple[Optimizer, torch.Tensor]] = []
        """Whose state was made in this call."""
        self._in_pieces: list[SameArithmetic] | None = None
        """Classes of parameters that are updated in pieces; None until these are looked for."""
        self._piecewise: dict[int, SameArithmetic] = {}
        """By the id of a parameter."""
        self._looked = 0
        """Times that they were looked for."""
        self._sizes: dict[Any, tuple[int, int]] = {}
        self._switches: list[Any] = []
        """Of the groups: which of their options are on, when these sizes were measured."""
        self._scratch: dict[Any, int] = {}
        """Of this call."""

    def begin(self) -> None:
        """Find each parameter's group, as it is now."""
        self._listed = [list(optimizer.state) for optimizer in self.optimizers]
        self.done = set()
        self._begun = []
        self._waiting = []
        self._scratch = {}
        self._every = {}
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._every.setdefault(id(parameter), []).append((optimizer, number))
        self._groups = {key: of[-1] for key, of in self._every.items()}

    def parameters(self) -> Iterable[nn.Parameter]:
        """That the optimizers train."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether an optimizer has this parameter."""
        return id(parameter) in self._groups

    def each_by_itself(self) -> bool:
        """Whether a step treats each parameter by itself, once, and nobody listens to it."""
        every = list(map(id, self.parameters()))
        return len(set(every)) == len(every) and all(map(each_by_itself, self.optimizers))

    def several_at_once(self, parameter: torch.Tensor) -> bool:
        """Whether a step of its optimizer takes no longer for several parameters than for one."""
        found = self._groups.get(id(parameter))
        return found is not None and not one_tensor_at_a_time(
            found[0].param_groups[found[1]], parameter
        )

    def update_later(self, parameter: torch.Tensor) -> None:
        """In the next `update_all_that_wait`."""
        self._waiting.append(parameter)

    def update_all_that_wait(self, parameter: torch.Tensor) -> None:
        """And this one."""
        waiting, self._waiting = self._waiting, []
        self.update(*waiting, parameter)

    def update(self, *parameters: torch.Tensor) -> None:
        """The optimizers' step for parameters that have gradients: in pieces for one, if it can be,
        and else one step for all of a group."""
        of: dict[tuple[Optimizer, int], list[torch.Tensor]] = {}
        for parameter in parameters:
            if (found := self._groups.get(id(parameter))) is not None:
                of.setdefault(found, []).append(parameter)
        for (optimizer, number), mine in of.items():
            self.done.update(map(id, mine))
            if len(mine) > 1 or not self._in_pieces_if_it_can(mine[0]):
                update(optimizer, optimizer.param_groups[number], *mine)
            if not self.keep_gradients:
                for parameter in mine:
                    parameter.grad = None

    def update_rest(self) -> None:
        """The optimizers' step for those that the graph does not reach, but an earlier call did."""
        for parameter in self.parameters():
            if parameter.grad is not None and id(parameter) not in self.done:
                self.update(parameter)

    # In pieces

    def begin_in_pieces(self, parameters: Iterable[torch.Tensor]) -> None:
        """Before the updates of a step that may be done in pieces."""
        if not self.in_graph:
            return
        if self._in_pieces is None or not self.refresh(self._in_pieces):
            self._in_pieces, self._piecewise = [], {}
            if self._looked < _MOST_LOOKED:
                self._look_for_pieces(parameters)

    def _look_for_pieces(self, parameters: Iterable[torch.Tensor]) -> None:
        self._looked += 1
        for parameter in parameters:
            self.arithmetic(parameter)
        classes, first_only = self.take_classes()
        classes = [one for one in classes if one.pointwise is not None]
        if self.refresh(classes):
            self._in_pieces = None if first_only else classes
            self._piecewise = {id(p): one for one in classes for p in one.parameters}

    def in_pieces(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's update is likely to be done so, however its gradient lies."""
        return id(parameter) in self._piecewise

    def _in_pieces_if_it_can(self, parameter: torch.Tensor) -> bool:
        one = self._piecewise.get(id(parameter))
        if one is None or one.pointwise is None or parameter.grad is None:
            return False
        state = one.optimizer.state.get(parameter, {})
        return one.pointwise.run(parameter, parameter.grad, state, one.numbers)

    def scratch_bytes(self, parameter: torch.Tensor, strides: Sequence[int]) -> int:
        """What an update that may be done in pieces asks for and frees, in bytes, with a gradient
        that has these strides."""
        found = self._groups.get(id(parameter))
        if found is None:
            return 0
        begun = bool(found[0].state.get(parameter))
        strides = tuple(map(int, strides))
        key = (*found, parameter.shape, parameter.stride(), parameter.dtype, strides, begun)
        if key not in self._scratch:
            self._scratch[key] = self._measure_scratch(parameter, strides)
        return self._scratch[key]

    def _measure_scratch(self, parameter: torch.Tensor, strides: tuple[int, ...]) -> int:
        self.arithmetic(parameter)
        classes, _ = self.take_classes()
        update = classes[0].pointwise if classes else None
        if update is not None:
            known = classes[0].arithmetic
            with as_in_a_step():
                like, meter = without_memory(parameter), Meter()
                gradient = torch.empty_strided(like.shape, strides, dtype=like.dtype, device="meta")
                state = dict(zip(known.state, known.begins_with, strict=True))
                with meter:
                    done = update.run(like, gradient, state, classes[0].numbers)
            if done:
                return meter.peak + _OF_NUMBERS
        copied = parameter.numel() * parameter.element_size()
        return self.state_bytes(parameter)[1] + copied * (strides != parameter.stride())

    # Arithmetic in the graph

    def arithmetic(
        self, parameter: torch.Tensor
    ) -> tuple[Arithmetic, Callable[[int], float]] | None:
        """A parameter's update as operators, and what gives the numbers in it when the graph runs.
        None where it is to be run as a whole."""
        found = self._groups.get(id(parameter))
        if found is None:
            return None
        optimizer, number = found
        made = self._arithmetic_of(optimizer, number, parameter)
        if made is None:
            group = optimizer.param_groups[number]
            without_state = not optimizer.state.get(parameter)
            self._first_only |= without_state and one_tensor_at_a_time(group, parameter)
            return None
        for one in self._classes:
            if one.holds(optimizer, number, made):
                break
        else:
            one = SameArithmetic(optimizer, number, made)
            self._classes.append(one)
        one.parameters.append(parameter)
        return made, one.numbers.__getitem__

    def state_of(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """A tensor of a parameter's state, as it is now."""
        optimizer, _ = self._groups[id(parameter)]
        found: torch.Tensor = optimizer.state[parameter][key]
        return found

    def take_classes(self) -> tuple[list[SameArithmetic], bool]:
        """Those of the graph that was made just now, and whether it is for a first step only."""
        found = self._classes, self._first_only
        self._classes, self._first_only = [], False
        return found

    def _arithmetic_of(
        self,
        optimizer: Optimizer,
        number: int,
        parameter: torch.Tensor,
        known: Arithmetic | None = None,
    ) -> Arithmetic | None:
        def shell_of(group: dict[str, Any], model: nn.Parameter, states: Any) -> Any:
            shell = alone(optimizer, group, model)
            shell.state = states
            return shell

        return arithmetic(
            lambda *given: plain_step(of_torch(type(optimizer)))(shell_of(*given)),
            lambda *given: begin(shell_of(*given)),
            optimizer.param_groups[number],
            parameter,
            optimizer.state.get(parameter, {}),
            known=known,
            ahead=self.ahead,
        )

    def refresh(self, classes: list[SameArithmetic]) -> bool:
        """Work out the numbers of the step that comes; False where its arithmetic is another one
        than that of the graph."""
        for one in classes:
            group = one.optimizer, one.number
            if any(self._groups.get(id(parameter)) != group for parameter in one.parameters):
                return False
            if one.arithmetic.state and not self._make_states(one):
                return False
            states = [one.optimizer.state.get(parameter, {}) for parameter in one.parameters]
            if len({scalars(state) for state in states}) != 1:
                return False
            parameter = one.parameters[0]
            now = self._arithmetic_of(one.optimizer, one.number, parameter, one.arithmetic)
            if now is None or not now.like(one.arithmetic):
                return False
            one.numbers[:] = now.numbers
        return True

    def _make_states(self, of: SameArithmetic) -> bool:
        """Have each parameter's state be there, as its first update would make it. False where the
        optimizer cannot."""
        group = of.optimizer.param_groups[of.number]
        for parameter in of.parameters:
            if of.optimizer.state.get(parameter):
                continue
            self._begun.append((of.optimizer, parameter))
            before = parameter.grad
            parameter.grad = torch.empty_like(parameter)
            try:
                begin(alone(of.optimizer, group, parameter))
            except torch.OutOfMemoryError:
                raise
            except Exception:
                return False
            finally:
                parameter.grad = before
        return True

    def forget_begun(self) -> None:
        """Take back the states that this call made."""
        for optimizer, parameter in self._begun:
            optimizer.state.pop(parameter, None)
        self._begun = []

    def in_their_order(self) -> None:
        """Have an optimizer's state list parameters as a step of all at once would have listed
        them, those of earlier steps first: what is saved is then the same, too."""
        listed, self._listed = self._listed, None
        for optimizer, before in zip(self.optimizers, listed or (), strict=False):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # as schedulers ask
            every = (one for group in optimizer.param_groups for one in group["params"])
            order = [one for one in dict.fromkeys((*before, *every)) if one in optimizer.state]
            if not all(map(operator.is_, optimizer.state, order)):
                for parameter in order:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)

    def needs(self, before: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """By a parameter's id: its `state_bytes`. `before`, as long as no option was switched on
        or off since, such as momentum, and no parameter has come or gone."""
        every = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        switches = [{key: _switch(value) for key, value in group.items()} for group in every]
        if before and switches == self._switches:
            return before
        self._switches, self._sizes = switches, {}
        return {id(one): self.state_bytes(one) for one in self.parameters()}

    def state_bytes(self, parameter: torch.Tensor) -> tuple[int, int]:
        """What a parameter's updates leave in the optimizers' states, and what one asks for and
        frees beside that, in bytes. (0, 0) where nobody updates it."""
        state = scratch = 0
        for found in self._every.get(id(parameter), ()):
            key = (*found, parameter.shape, parameter.stride(), parameter.dtype)
            if key not in self._sizes:
                with as_in_a_step():
                    self._sizes[key] = self._measure(*found, parameter)
            held = tensors(list(found[0].state.get(parameter, {}).values()))
            state += max(self._sizes[key][0], sum(map(storage_bytes, held)))
            scratch = max(scratch, self._sizes[key][1])
        return state, scratch

    def behind_bytes(self) -> int:
        """What a step of the optimizers asks for and frees when all gradients are there, in bytes.
        Each group is measured as a whole: of one tensor an optimizer's code may still hold
        something when it comes to the next; foreach kernels work on all."""
        most = len(self._every) * _OF_NUMBERS  # norms, where gradients are clipped
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                params = group["params"]
                if all(one_tensor_at_a_time(group, one) for one in params):
                    with as_in_a_step():
                        _, scratch = self._measure(optimizer, number, *params)
                else:
                    scratch = sum(self.state_bytes(one)[1] for one in params)
                most = max(most, scratch)
        return most

    def _measure(
        self, optimizer: Optimizer, number: int, *parameters: torch.Tensor
    ) -> tuple[int, int]:
        """As `state_bytes`, of a step of these alone."""
        models = [nn.Parameter(without_memory(one)) for one in parameters]
        for model in models:
            model.grad = torch.empty_like(model)
        group = optimizer.param_groups[number]
        group = {**group, **{key: None for key in ("foreach", "fused") if key in group}}
        shell = alone(optimizer, group, *models)  # such kernels are not there
        shell.state = defaultdict(dict)
        meter = Meter()
        with meter:
            plain_step(of_torch(type(optimizer)))(shell)
        held = tensors(list(shell.state.values()))
        seen = sum(storage_bytes(one) for one in held if one.is_meta)  # counts of steps are not
        state = sum(map(storage_bytes, held))
        scratch = 0 if optimizer.param_groups[number].get("fused") else max(0, meter.peak - seen)
        return state, scratch + _OF_NUMBERS


def _switch(value: Any) -> Any:
    """Of an option: all that decides how much memory an update takes."""
    if isinstance(value, (list, tuple)):
        return [_switch(one) for one in value]
    if isinstance(value, torch.Tensor):
        return id(value) if isinstance(value, nn.Parameter) else None
    return value != 0 if isinstance(value, (int, float)) else value


class SameArithmetic:
    """Parameters of one group with the same arithmetic and the same numbers in it."""

    def __init__(self, optimizer: Optimizer, number: int, arithmetic: Arithmetic) -> None:
        self.optimizer = optimizer
        self.number = number
        self.arithmetic = arithmetic
        self.numbers = list(arithmetic.numbers)
        self.parameters: list[torch.Tensor] = []

    @cached_property
    def pointwise(self) -> Pointwise | None:
        """What does these updates in pieces; None where that would be another update."""
        return pointwise(self.arithmetic, self.parameters[0])

    def holds(self, optimizer: Optimizer, number: int, arithmetic: Arithmetic) -> bool:
        """Whether a parameter is one of these."""
        return (
            (optimizer, number) == (self.optimizer, self.number)
            and arithmetic.scalars == self.arithmetic.scalars
            and arithmetic.like(self.arithmetic)
        )
