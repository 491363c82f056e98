"""Captures a training step: one plain step is recorded and becomes a `StepProgram`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memplan.runtime.compiled.after import finish
from memplan.runtime.compiled.arguments import flatten_arguments
from memplan.runtime.compiled.constructs import Constructs, Hyperparameters
from memplan.runtime.compiled.fast_paths import fast_paths
from memplan.runtime.compiled.kept_numbers import plain_numbers, put_back
from memplan.runtime.compiled.lifting import Alias, Places
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.program import RecordedStep, StepProgram
from memplan.runtime.compiled.recording import Recorder
from memplan.runtime.compiled.value_readers import ValueReaders

Optimizers = Optimizer | Sequence[Optimizer] | None
Models = nn.Module | Sequence[nn.Module]


def record_step(
    train_step: Callable[..., Any],
    *,
    model: Models,
    optimizer: Optimizers,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    compares_types: str = "",
) -> RecordedStep:
    """Runs one step for real, with all its effects, and records it.

    The optimizer's state must be there already: a step came before. What the step raises is raised
    as it is. Where the step turns out not to be capturable it still runs to its end.
    `compares_types`: `file:line` where its code tells numbers by `type(x)`, if it does: it is given
    plain numbers.
    """
    kwargs = kwargs or {}
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = optimizers_of(optimizer)
    arguments, _ = flatten_arguments(args, kwargs)
    places = Places(train_step, models, optimizers, arguments)
    recorder = Recorder(places)
    for leaf in arguments:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            recorder.refuse(NotCapturable("an argument that requires a gradient"))
    for place, parameter in places.gradients:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            recorder.refuse(NotCapturable(f"{place.path} is sparse"))
    before = places.look()
    aliases = places.aliases()
    hyperparameters = Hyperparameters(recorder, optimizers, constant=bool(compares_types))
    constructs = Constructs(recorder, hyperparameters, compares_types)
    try:
        with fast_paths(), hyperparameters, constructs, ValueReaders(recorder), recorder:
            result = train_step(*args, **kwargs)
    except BaseException:
        put_back(recorder.numbers)
        raise
    program = None
    if recorder.refusal is None:
        try:
            program = finish(recorder, before, result)
            program.effects.extend(constructs.schedules.effects)
            program.gradients_before.extend(
                (place, was is not None) for place, was in before.gradients
            )
            program.aliases.extend(_of_inputs(aliases, program))
        except NotCapturable as refusal:
            recorder.refuse(refusal)
        except Exception as fault:
            recorder.refuse(NotCapturable(f"a fault of memplan: {fault!r}", "", "please report it"))
    result = plain_numbers(result)
    if (kept := put_back(recorder.numbers)) is not None:
        recorder.refuse(kept)
    if recorder.refusal is not None:
        program = None
    return RecordedStep(result, program, recorder.refusal)


def capture_step(
    train_step: Callable[..., Any],
    *,
    model: Models,
    optimizer: Optimizers,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> StepProgram:
    """Runs the step twice for real, and gives the second one as a program. The model may be fake.

    Raises NotCapturable, with the construct and the line, where there is none.
    """
    train_step(*args, **(kwargs or {}))
    recorded = record_step(train_step, model=model, optimizer=optimizer, args=args, kwargs=kwargs)
    if recorded.program is None:
        assert recorded.refusal is not None
        raise recorded.refusal
    return recorded.program


def _of_inputs(groups: list[list[Alias]], program: StepProgram) -> Iterator[list[Alias]]:
    """Of places that share a storage, those whose sharing matters to a program."""
    inputs = {id(one.place) for one in program.inputs}
    freed = {id(place) for place in program.frees}
    for group in groups:
        kept = [alias for alias in group if id(alias[0]) not in freed]
        if len(kept) > 1 and any(id(place) in inputs for place, _ in kept):
            yield kept


def optimizers_of(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
