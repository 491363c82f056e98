"""Optimizer updates of single parameters, run as soon as their gradients are computed.

PyTorch's own optimizers treat each parameter by itself. So the optimizer's own code, run with one
parameter and the options that its group has at that moment, gives the bits of a step of all.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memplan.runtime.graph.arithmetic import (
    Arithmetic,
    arithmetic,
    meta_like,
    one_tensor_at_a_time,
    outside_compilation,
    scalars,
)
from memplan.runtime.graph.meta_peak import MetaPeak, storage_bytes
from memplan.runtime.graph.program import tensors
from memplan.runtime.graph.update_program import UpdateProgram, update_program
from memplan.runtime.one_update import alone, begin, each_by_itself, of_torch, plain_step, update
from memplan.types.allocation import ROUNDING

Optimizer = torch.optim.Optimizer
_MAX_SEARCHES = 8
"""After so many searches because the arithmetic of updates changed, optimizers run their own."""
_OF_NUMBERS = 16
"""Bytes of the tensors that Python numbers become while an operator runs."""
_MORE_NUMBERS = 4
"""Numbers beside the norms that are there at once while gradients are clipped."""


class Updates:
    """The optimizers of a step, and how they update each parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.in_graph = False
        """Whether this call updates parameters as soon as their gradients are computed."""
        self.keep_gradients = False
        self.programs = True
        """Whether updates may run by programs, in place of the optimizers' own step."""
        self.chunked = False
        """Whether programs work in chunks."""
        self._state_order: list[list[torch.Tensor]] | None = None
        """The parameters in each optimizer's state, in order, when this call began. None outside of
        a call that runs a graph."""
        self.updated: set[int] = set()
        """Ids of parameters that this call has updated."""
        self._groups_by_parameter: dict[int, list[tuple[Optimizer, int]]] = {}
        """The optimizers that train each parameter, by its id, with the number of its group."""
        self._groups: dict[int, tuple[Optimizer, int]] = {}
        """The last of them. Where updates are part of the graph, it is the only one."""
        self._postponed: list[torch.Tensor] = []
        """Parameters with a gradient that a later update of their group includes."""
        self._new_states: list[tuple[Optimizer, torch.Tensor]] = []
        """Parameters whose optimizer state was created in this call."""
        self.class_of: dict[int, UpdateClass] = {}
        """How parameters are updated that have a program for it, by the parameter's id."""
        self._sizes: dict[Any, tuple[int, int]] = {}
        """Results of `state_bytes`."""
        self._switches: list[Any] = []
        """Which options of each group were on when these sizes were measured."""
        self._scratch: dict[Any, int] = {}
        """Results of `scratch_bytes` in this call."""

    def begin(self) -> None:
        """Begin a call: find the current group of each parameter."""
        self._state_order = [list(optimizer.state) for optimizer in self.optimizers]
        self.updated = set()
        self._new_states = []
        self._postponed = []
        self._scratch = {}
        self._groups_by_parameter = {}
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._groups_by_parameter.setdefault(id(parameter), []).append(
                        (optimizer, number)
                    )
        self._groups = {key: of[-1] for key, of in self._groups_by_parameter.items()}

    def parameters(self) -> Iterable[nn.Parameter]:
        """All parameters of the optimizers."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether an optimizer has this parameter."""
        return id(parameter) in self._groups

    def written(self) -> Iterator[torch.Tensor]:
        """What the updates of this call change beside parameters: gradients of earlier calls and,
        where updates are part of the graph, optimizer state."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                yield parameter.grad
        for optimizer in self.optimizers if self.in_graph else ():
            for state in optimizer.state.values():
                yield from (one for one in state.values() if isinstance(one, torch.Tensor))

    def options(self) -> Iterator[torch.Tensor]:
        """Tensors among the optimizers' options, which updates that are part of the graph read."""
        for optimizer in self.optimizers if self.in_graph else ():
            for group in optimizer.param_groups:
                yield from tensors([value for key, value in group.items() if key != "params"])

    def objects(self, *, in_graph: bool) -> set[int]:
        """Ids of objects that the coming update uses: parameters, for their gradients; where
        updates are part of the graph also what the optimizers have."""
        found = set(map(id, self.parameters()))
        for optimizer in self.optimizers if in_graph else ():
            for held in (vars(optimizer), *optimizer.param_groups, *optimizer.state.values()):
                lasting = (one for one in held.values() if isinstance(one, (dict, list)))
                found |= {id(optimizer), id(held), *map(id, lasting)}
        return found

    def each_by_itself(self) -> bool:
        """Whether a step updates each parameter once and by itself, without hooks around it."""
        ids = list(map(id, self.parameters()))
        return len(set(ids)) == len(ids) and all(map(each_by_itself, self.optimizers))

    def is_batched(self, parameter: torch.Tensor) -> bool:
        """Whether a step of its optimizer takes no longer for several parameters than for one."""
        found = self._groups.get(id(parameter))
        return found is not None and not one_tensor_at_a_time(
            found[0].param_groups[found[1]], parameter
        )

    def postpone(self, parameter: torch.Tensor) -> None:
        """Leave an update to the next `update_with_postponed`."""
        self._postponed.append(parameter)

    def update_with_postponed(self, parameter: torch.Tensor) -> None:
        """Update a parameter together with all postponed ones."""
        postponed, self._postponed = self._postponed, []
        self.update(*postponed, parameter, within=True)

    def update(self, *parameters: torch.Tensor, within: bool = False) -> None:
        """Update parameters that have gradients, `within` a graph's code: a single one by its
        program if there is one, several of a group by one step of their optimizer."""
        by_group: dict[tuple[Optimizer, int], list[torch.Tensor]] = {}
        for parameter in parameters:
            if (found := self._groups.get(id(parameter))) is not None:
                by_group.setdefault(found, []).append(parameter)
        for (optimizer, number), members in by_group.items():
            self.updated.update(map(id, members))
            if len(members) > 1 or not self._run_program(members[0], within):
                update(optimizer, optimizer.param_groups[number], *members)
            if not self.keep_gradients:
                for parameter in members:
                    parameter.grad = None

    def update_rest(self) -> None:
        """Update parameters that have a gradient from an earlier call, but none from this one."""
        for parameter in self.parameters():
            if parameter.grad is not None and id(parameter) not in self.updated:
                self.update(parameter)

    # Updates by programs

    def _run_program(self, parameter: torch.Tensor, within: bool) -> bool:
        one = self.class_of.get(id(parameter))
        if one is None or parameter.grad is None:
            return False
        gradient, parameter.grad = [parameter.grad], None
        state = one.optimizer.state.get(parameter, {})
        ran = one.program.run(parameter, gradient, state, one.numbers, within=within)
        if gradient:
            parameter.grad = gradient[0]
        return ran

    def classes_of(self, parameters: Iterable[Any]) -> tuple[list[UpdateClass], bool]:
        """Classes of those parameters whose updates can be programs, and whether more of them can
        once their optimizers have a state."""
        classes: list[UpdateClass] = []
        later = False
        for parameter in parameters:
            found = self._groups.get(id(parameter))
            if found is None or not self.programs or (self.keep_gradients and not self.chunked):
                continue  # without chunks, a program overwrites the gradient
            optimizer, number = found
            made = self.arithmetic(optimizer, number, parameter)
            if made is None:
                by_itself = one_tensor_at_a_time(optimizer.param_groups[number], parameter)
                later |= by_itself and not optimizer.state.get(parameter)
                continue
            known = (one for one in classes if one.holds(optimizer, number, made, parameter))
            one = next(known, None)
            if one is None:
                with outside_compilation():
                    program = update_program(made, parameter, chunked=self.chunked)
                if program is None:
                    continue
                one = UpdateClass(optimizer, number, made, program)
                classes.append(one)
            one.parameters.append(parameter)
        return classes, later

    def scratch_bytes(self, parameter: torch.Tensor, strides: Sequence[int]) -> int:
        """Bytes that an update needs beside a gradient of these strides."""
        found = self._groups.get(id(parameter))
        if found is None:
            return 0
        begun = bool(found[0].state.get(parameter))
        strides = tuple(map(int, strides))
        key = (*found, parameter.shape, parameter.stride(), parameter.dtype, strides, begun)
        if key not in self._scratch:
            self._scratch[key] = self._measure_update_scratch(parameter, strides)
        return self._scratch[key]

    def _measure_update_scratch(self, parameter: torch.Tensor, strides: tuple[int, ...]) -> int:
        classes, _ = self.classes_of([parameter])
        for one in classes:
            with outside_compilation():
                like, meter = meta_like(parameter), MetaPeak()
                known = one.arithmetic
                state = dict(zip(known.state, known.initial_state, strict=True))
                with meter:
                    gradient = [
                        torch.empty_strided(like.shape, strides, dtype=like.dtype, device="meta")
                    ]
                    most = storage_bytes(gradient[0])
                    ran = one.program.run(like, gradient, state, one.numbers)
            if ran:
                return max(0, meter.peak - most) + _OF_NUMBERS
        copied = parameter.numel() * parameter.element_size()
        return self.state_bytes(parameter)[1] + copied * (strides != parameter.stride())

    def arithmetic(
        self,
        optimizer: Optimizer,
        number: int,
        parameter: torch.Tensor,
        known: Arithmetic | None = None,
    ) -> Arithmetic | None:
        """A parameter's update as operators; None where the optimizer's own step has to run."""

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
        )

    def refresh_numbers(self, classes: list[UpdateClass]) -> bool:
        """Compute the coming step's numbers. False if its arithmetic is another one."""
        for one in classes:
            group = one.optimizer, one.number
            if any(self._groups.get(id(parameter)) != group for parameter in one.parameters):
                return False
            if one.arithmetic.state and not self._create_states(one):
                return False
            states = [one.optimizer.state.get(parameter, {}) for parameter in one.parameters]
            if len({scalars(state) for state in states}) != 1:
                return False
            parameter = one.parameters[0]
            now = self.arithmetic(one.optimizer, one.number, parameter, one.arithmetic)
            if now is None or not now.same_operations(one.arithmetic):
                return False
            one.numbers[:] = now.numbers
        return True

    def _create_states(self, of: UpdateClass) -> bool:
        """Create the optimizer state of each parameter as its first update would. False where the
        optimizer cannot do that."""
        group = of.optimizer.param_groups[of.number]
        for parameter in of.parameters:
            if of.optimizer.state.get(parameter):
                continue
            self._new_states.append((of.optimizer, parameter))
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

    def discard_new_states(self) -> None:
        """Remove the states that this call created."""
        for optimizer, parameter in self._new_states:
            optimizer.state.pop(parameter, None)
        self._new_states = []

    def restore_state_order(self) -> None:
        """Sort each optimizer's state as a plain step would have created it, so that a saved
        checkpoint is the same, too."""
        listed, self._state_order = self._state_order, None
        for optimizer, before in zip(self.optimizers, listed or (), strict=False):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # as schedulers ask
            every = (one for group in optimizer.param_groups for one in group["params"])
            order = [one for one in dict.fromkeys((*before, *every)) if one in optimizer.state]
            if not all(map(operator.is_, optimizer.state, order)):
                for parameter in order:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)

    def memory_needs(self, before: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """The `state_bytes` of each parameter, by its id. Returns `before`, an earlier result, as
        long as no option such as momentum was switched on or off and no parameter came or went."""
        every = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        switches = [{key: _switch(value) for key, value in group.items()} for group in every]
        if before and switches == self._switches:
            return before
        self._switches, self._sizes = switches, {}
        return {id(one): self.state_bytes(one) for one in self.parameters()}

    def state_bytes(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Bytes that a parameter's updates leave in the optimizers' states, and bytes that one
        update allocates and frees. (0, 0) for a parameter of no optimizer."""
        state = scratch = 0
        for found in self._groups_by_parameter.get(id(parameter), ()):
            key = (*found, parameter.shape, parameter.stride(), parameter.dtype)
            if key not in self._sizes:
                with outside_compilation():
                    self._sizes[key] = self._measure(*found, parameter)
            held = tensors(list(found[0].state.get(parameter, {}).values()))
            state += max(self._sizes[key][0], sum(map(storage_bytes, held)))
            scratch = max(scratch, self._sizes[key][1])
        return state, scratch

    def step_scratch_bytes(self) -> int:
        """Bytes that the optimizers' step after backward allocates and frees.

        Each group is measured as a whole: foreach kernels work on all of its tensors, and a loop
        over them may still hold a temporary of one tensor when it comes to the next.
        """
        # Norms where gradients are clipped, with what is computed of them, and a scaler's numbers:
        # on CUDA a block each. All norms are in one more tensor.
        on_cuda = any(one.is_cuda for one in self.parameters())
        each = _OF_NUMBERS + (ROUNDING if on_cuda else 0)
        most = (len(self._groups_by_parameter) + _MORE_NUMBERS) * each
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                params = group["params"]
                if all(one_tensor_at_a_time(group, one) for one in params):
                    with outside_compilation():
                        _, scratch = self._measure(optimizer, number, *params)
                else:
                    scratch = sum(self.state_bytes(one)[1] for one in params)
                most = max(most, scratch)
        return most

    def _measure(
        self, optimizer: Optimizer, number: int, *parameters: torch.Tensor
    ) -> tuple[int, int]:
        """As `state_bytes`, for one step of these parameters."""
        can_train = (one for one in parameters if one.is_floating_point() or one.is_complex())
        models = [nn.Parameter(meta_like(one)) for one in can_train]
        for model in models:
            model.grad = torch.empty_like(model)
        group = optimizer.param_groups[number]
        group = {**group, **{key: None for key in ("foreach", "fused") if key in group}}
        shell = alone(optimizer, group, *models)  # such kernels are not there
        shell.state = defaultdict(dict)
        meter = MetaPeak()
        # A function that the optimizer compiles itself would be marked as one not to be compiled.
        with torch.compiler.set_stance("force_eager"), meter:
            plain_step(of_torch(type(optimizer)))(shell)
        held = tensors(list(shell.state.values()))
        seen = sum(storage_bytes(one) for one in held if one.is_meta)  # counts of steps are not
        state = sum(map(storage_bytes, held))
        scratch = 0 if optimizer.param_groups[number].get("fused") else max(0, meter.peak - seen)
        return state, scratch + _OF_NUMBERS


def _switch(value: Any) -> Any:
    """The part of an option's value that decides how much memory an update takes."""
    if isinstance(value, (list, tuple)):
        return [_switch(one) for one in value]
    if isinstance(value, torch.Tensor):
        return id(value) if isinstance(value, nn.Parameter) else None
    return value != 0 if isinstance(value, (int, float)) else value


class UpdateClass:
    """Parameters of one group and one layout, with the same arithmetic and numbers in it. Numbers
    may depend on a parameter's shape, as Muon's learning rate does."""

    def __init__(
        self, optimizer: Optimizer, number: int, arithmetic: Arithmetic, program: UpdateProgram
    ) -> None:
        self.optimizer = optimizer
        self.number = number
        self.arithmetic = arithmetic
        self.numbers = list(arithmetic.numbers)
        self.parameters: list[torch.Tensor] = []
        self.program = program

    def holds(
        self, optimizer: Optimizer, number: int, arithmetic: Arithmetic, parameter: torch.Tensor
    ) -> bool:
        """Whether a parameter with this update belongs to the class."""
        return (
            (optimizer, number) == (self.optimizer, self.number)
            and _layout(parameter) == _layout(self.parameters[0])
            and arithmetic.scalars == self.arithmetic.scalars
            and arithmetic.same_operations(self.arithmetic)
        )


def _layout(of: torch.Tensor) -> Any:
    return of.shape, of.stride(), of.dtype, of.device


class UpdatePlan:
    """How the updates of one graph run."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._classes: list[UpdateClass] | None = None
        """None until updates are searched for programs, and while a later search finds more."""
        self._searches = 0

    def begin(self, parameters: Iterable[Any]) -> bool:
        """To be called before each run of the graph with what it trains. Returns whether that is
        updated in another way than before, and with other memory."""
        updates = self._updates
        if not updates.in_graph:
            return False
        classes, changed = self._classes, False
        if classes is None or not updates.refresh_numbers(classes):
            changed = self._searches > 0
            self._searches += 1
            updates.programs &= self._searches <= _MAX_SEARCHES
            classes, later = updates.classes_of(parameters)
            if not updates.refresh_numbers(classes):
                classes = []
            self._classes = None if later else classes
        updates.class_of = {id(p): one for one in classes for p in one.parameters}
        return changed
