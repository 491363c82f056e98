"""`memplan.compile`: a training step, run as one graph in the order that needs the least memory."""

from __future__ import annotations

import functools
import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.utils._pytree import TreeSpec

from memplan.capture.internals import require
from memplan.runtime.compiled.applied import AppliedProgram, OutOfMemoryUnharmed
from memplan.runtime.compiled.arguments import flatten_arguments
from memplan.runtime.compiled.capture import record_step
from memplan.runtime.compiled.dependencies import operators
from memplan.runtime.compiled.gradients import without_old_gradients
from memplan.runtime.compiled.guards import (
    Arguments,
    Gradients,
    Guards,
    current_settings,
    settings_changed,
)
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.ordering import choose_order
from memplan.runtime.compiled.program import Kind, StepProgram
from memplan.runtime.compiled.python_state import Change, PythonState
from memplan.runtime.compiled.recompute import within_budget
from memplan.runtime.compiled.refusals import check_model, check_optimizer, check_parameters
from memplan.runtime.compiled.report import CompileReport, ProgramReport
from memplan.runtime.compiled.side_effects import SideEffects
from memplan.types.device import parse_size
from memplan.types.errors import InfeasibleError, UsageError

log = logging.getLogger("memplan")

MOST_PROGRAMS = 8
"""Sets of shapes and settings that are captured; steps unlike all of them run plainly."""
_MOST_UNSETTLED = 3
"""Steps in a row that change Python values, before the step is taken for one that always does."""

_MOST_SURPRISES = 3
"""Calls in a row whose foreseen values are none of those that were recorded."""

_MOST_LATER = 20
"""Recorded steps of which each says that another one may do: a scaler that skips its updates."""

P = ParamSpec("P")
R = TypeVar("R")


def compile(
    train_step: Callable[P, R],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    budget: int | str | None = None,
    order: bool = True,
    keep_gradients: bool = True,
    deadline_seconds: float = 20.0,
    seed: int = 0,
) -> CompiledStep[P, R]:
    """A function that does what `train_step` does, with less memory.

    `train_step` runs one whole step: forward, backward and update. Its first call runs as it is,
    the second one is recorded while it runs, and from the third on the recorded operators run in
    the order that needs the least memory, each storage freed at its last use. Losses, gradients,
    weights and optimizer state are the same bits as in the plain step. `order=False` leaves the
    operators in their order. `budget`: bytes, or a size such as "8GiB", that the step's storages
    (weights, gradients, optimizer state, inputs, activations) must not exceed; activations are
    recomputed where that is needed. `keep_gradients=False` leaves `.grad` None after a step that
    frees the gradients before it needs them, so that each can be freed after its update; a step
    that ends with `zero_grad()` says so itself. `deadline_seconds` is the longest that the search
    for an order takes, once for each set of shapes, `seed` that of its random choices.

    Steps with other shapes, settings or Python values are recorded anew, at most `MOST_PROGRAMS`
    times. A step that cannot be a graph (it branches on a tensor's value, changes Python values,
    ...) runs as it is, with one warning that names why and where.

    Raises UsageError for what is no step, model, optimizer or budget; a call raises InfeasibleError
    for a budget that cannot be met.
    """
    require("runtime/compiled")
    if not callable(train_step):
        raise UsageError(f"{type(train_step).__name__} is no training step", "a function")
    models = _all_of("model", model, torch.nn.Module)
    optimizers = _all_of("optimizer", optimizer, torch.optim.Optimizer)
    limit = parse_size(budget) if isinstance(budget, str) else budget
    if limit is not None and (type(limit) is not int or limit <= 0):
        raise UsageError(f"a budget of {limit!r}", 'whole bytes, or a size such as "8GiB"')
    for name, value in (("order", order), ("keep_gradients", keep_gradients)):
        if type(value) is not bool:
            raise UsageError(f"{name}={value!r}", "True or False")
    if type(seed) is not int or seed < 0:
        raise UsageError(f"seed={seed!r}", "a whole number, such as 0")
    if type(deadline_seconds) not in (int, float) or not deadline_seconds >= 0:
        raise UsageError(f"deadline_seconds={deadline_seconds}", "seconds, such as 20")
    options = Options(limit, order, keep_gradients, deadline_seconds, seed)
    return CompiledStep(train_step, models, optimizers, options)


def _all_of(what: str, given: Any, kind: type) -> tuple[Any, ...]:
    items = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for item in items:
        if not isinstance(item, kind):
            raise UsageError(
                f"{what}={type(item).__name__} is no {kind.__module__.split('.')[0]} "
                f"{kind.__name__}",
                f"the {what} that the step trains",
            )
    if not items:
        raise UsageError(f"no {what}", f"the {what} that the step trains")
    return items


def _left(
    args: Any,
    kwargs: dict[str, Any],
    leaves: list[Any],
    arguments: Arguments,
    settings: tuple[Any, ...],
) -> NotCapturable | None:
    """What a recorded step did to its caller's arguments and PyTorch's settings, which a graph does
    not do."""
    now, spec = flatten_arguments(args, kwargs)
    if len(now) == len(leaves) and any(map(operator.is_not, now, leaves)):
        return NotCapturable("it puts other values into an argument", "", _COPY)
    if different := arguments.difference(now, spec):
        return NotCapturable(f"it changes its arguments: {different}", "", _COPY)
    if different := settings_changed(settings):
        return NotCapturable(f"it leaves a setting changed: {different}", "", "use `with`")
    return None


_COPY = "change a copy: batch = dict(batch)"


@dataclass(frozen=True)
class Options:
    """What `compile` was asked for."""

    budget_bytes: int | None
    order: bool
    keep_gradients: bool
    deadline_seconds: float
    seed: int


class CompiledStep(Generic[P, R]):
    """A step as `compile` makes it. Call it as the step itself; `report()` says what it does."""

    def __init__(
        self,
        step: Callable[P, R],
        models: tuple[torch.nn.Module, ...],
        optimizers: tuple[torch.optim.Optimizer, ...],
        options: Options,
    ) -> None:
        functools.update_wrapper(self, step)
        self.__name__: str = getattr(step, "__name__", type(step).__name__)
        self._step = step
        self._models, self._optimizers = models, optimizers
        self._options = options
        self._programs: list[AppliedProgram] = []
        self._plain_calls = 0
        self._unsettled = 0
        self._surprises = 0
        self._later = 0
        self._fallback = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a compiled step trains the very model that it was made for and cannot be copied or "
            "pickled: compile the step of the copy"
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._fallback:
            return self._plainly(args, kwargs)
        leaves, spec = flatten_arguments(args, kwargs)
        different = surprise = ""
        for place, applied in enumerate(self._programs):
            why = applied.guards.before_reading(leaves, spec)
            if not why:
                values = applied.program.read(leaves)
                why = applied.guards.of_inputs(values)
            if not why:
                why = applied.guards.of_foreseen(values)
                surprise = surprise or why
            if not why:
                if place:
                    self._programs.insert(0, self._programs.pop(place))
                return self._run(applied, values, args, kwargs)
            different = different or why
        self._surprises += bool(surprise)
        if self._surprises > _MOST_SURPRISES:
            self._give_up(
                f"{surprise}, and was yet another one in each of the calls before",
                "keep such code out of the step, or make it tensor operations",
            )
            return self._plainly(args, kwargs)
        return self._first_time(different, leaves, spec, args, kwargs)

    def report(self) -> CompileReport:
        """What has become of the step so far."""
        return CompileReport(
            [self._report_of(applied) for applied in self._programs],
            self._plain_calls,
            self._fallback,
        )

    def _report_of(self, applied: AppliedProgram) -> ProgramReport:
        found = applied.ordering
        return ProgramReport(
            operators=found.operators,
            plain_peak_bytes=found.program_peak_bytes,
            ordered_peak_bytes=found.ordered_peak_bytes,
            lower_bound_bytes=found.lower_bound_bytes,
            order_seconds=found.seconds,
            budget_bytes=self._options.budget_bytes,
            recomputed=applied.recomputed,
            calls=applied.calls,
        )

    # One call

    def _run(
        self, applied: AppliedProgram, values: list[Any], args: Any, kwargs: dict[str, Any]
    ) -> R:
        try:
            result: R = applied.run(values)
            self._surprises = 0
            return result
        except OutOfMemoryUnharmed as error:
            why = str(error)
        # Not in the handler: the error's frames hold what the failed run had made.
        self._give_up(f"out of memory in the compiled step ({why}); nothing was changed")
        return self._plainly(args, kwargs)

    def _plainly(self, args: Any, kwargs: dict[str, Any]) -> R:
        self._plain_calls += 1
        return self._step(*args, **kwargs)

    def _first_time(
        self, different: str, leaves: list[Any], spec: TreeSpec, args: Any, kwargs: dict[str, Any]
    ) -> R:
        """A call unlike those that were captured."""
        if len(self._programs) >= MOST_PROGRAMS:
            self._give_up(
                f"{MOST_PROGRAMS} kinds of steps have been captured and this is another one "
                f"({different})",
                "the same shapes in each call: pad, or drop the last batch",
            )
            return self._plainly(args, kwargs)
        if not self._plain_calls:
            try:
                check_optimizer(self._optimizers)
                check_model(self._models)
            except NotCapturable as refusal:
                self._refuse(refusal)
            return self._plainly(args, kwargs)
        if different:
            log.warning("memplan: %s is captured again: %s", self.__name__, different)
        return self._recorded(leaves, spec, args, kwargs)

    def _recorded(self, leaves: list[Any], spec: TreeSpec, args: Any, kwargs: dict[str, Any]) -> R:
        """A plain call, recorded."""
        try:
            for model in self._models:
                check_parameters(model.named_parameters())
        except NotCapturable as refusal:
            self._refuse(refusal)
            return self._plainly(args, kwargs)
        state = self._python_state(leaves)
        gradients = Gradients(p for model in self._models for p in model.named_parameters())
        arguments, settings = Arguments(leaves, spec), current_settings()
        self._plain_calls += 1
        with SideEffects() as seen:
            recorded = record_step(
                self._step,
                model=self._models[0] if len(self._models) == 1 else self._models,
                optimizer=self._optimizers,
                args=args,
                kwargs=kwargs,
                compares_types=state.compares_types(),
            )
        why = recorded.refusal or seen.refusal or _left(args, kwargs, leaves, arguments, settings)
        if recorded.program is None or why is not None:
            assert isinstance(why, NotCapturable)
            self._later += 1
            if not why.later or self._later > _MOST_LATER:
                self._refuse(why)
        elif changes := self._changes(state, recorded.program):
            self._not_settled(changes[0])
        elif (lost := self._lost(state, recorded.program)) is not None:
            self._refuse(
                NotCapturable(
                    f"it puts another tensor into {lost.where}, out of memplan's sight",
                    lost.line,
                    "keep it in an attribute of the model, or write it in place: copy_",
                )
            )
        else:
            program = recorded.program
            try:
                guards = Guards(
                    program,
                    arguments=arguments,
                    state=state,
                    gradients=gradients,
                    settings=settings,
                    values=program.read(leaves),
                )
                self._apply(program, guards)
            except InfeasibleError:
                raise
            except Exception as fault:
                self._give_up(f"a fault of memplan: {fault!r}", "please report it")
        result: R = recorded.result
        return result

    def _python_state(self, leaves: list[Any]) -> PythonState:
        roots: dict[str, object] = {}
        for kind, items in (("model", self._models), ("optimizer", self._optimizers)):
            for place, item in enumerate(items):
                roots[kind if len(items) == 1 else f"{kind}[{place}]"] = item
        roots |= {f"argument {place}": leaf for place, leaf in enumerate(leaves)}
        return PythonState(self._step, roots)

    def _changes(self, state: PythonState, program: StepProgram) -> list[Change]:
        for one in program.inputs:
            if one.kind is Kind.SCALAR:
                key = one.place.key
                state.let_change(one.place.owner, key[0] if isinstance(key, tuple) else key)
        return state.changed(growth=True)

    def _lost(self, state: PythonState, program: StepProgram) -> Change | None:
        """A tensor that the recorded step has put where a run of the program would not."""
        kept = {id(one.place.read()) for one in program.rebound}
        return next(state.lost_tensors(kept), None)

    def _apply(self, program: StepProgram, guards: Guards) -> None:
        self._unsettled = 0
        chosen = self._options
        if not chosen.keep_gradients:
            program = without_old_gradients(program)
        options: dict[str, Any] = {
            "search": chosen.order,
            "deadline_seconds": chosen.deadline_seconds,
            "seed": chosen.seed,
        }
        if chosen.budget_bytes is None:
            applied = AppliedProgram(program, guards, choose_order(operators(program), **options))
        else:
            within = within_budget(program, chosen.budget_bytes, **options)
            applied = AppliedProgram(within.program, guards, within.ordering, within.recomputed)
        self._programs.insert(0, applied)
        log.info("memplan: %s: %s", self.__name__, self._report_of(self._programs[0]))

    # Falling back

    def _not_settled(self, change: Change) -> None:
        self._unsettled += 1
        if self._unsettled >= _MOST_UNSETTLED:
            counts = change.where.startswith("optimizer")
            self._refuse(
                NotCapturable(
                    f"it changes {change.where} (from {change.before} to {change.after})",
                    change.line,
                    "an optimizer that counts its steps in tensors, as torch.optim's do"
                    if counts
                    else "keep such values in tensors, or change them outside the step",
                )
            )

    def _refuse(self, refusal: NotCapturable) -> None:
        self._give_up(refusal.message, refusal.hint)

    def _give_up(self, why: str, hint: str = "") -> None:
        self._programs.clear()
        self._fallback = why
        tail = f" (try: {hint})" if hint else ""
        warnings.warn(f"memplan: {self.__name__} runs plainly: {why}{tail}", stacklevel=4)
