"""Small training jobs, and how a compiled one is held against the plain loop, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memplan
from memplan.runtime.graph.extra_guards import missing_guards
from memplan.runtime.graph.step import CompiledStep

captures_steps = pytest.mark.skipif(
    bool(missing_guards()), reason=f"steps run plainly: {missing_guards()}"
)
"""For tests of what only a captured step has."""


@dataclass
class Job:
    """A model, its optimizers, the loss and what each call is given."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss_fn: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    between: Callable[[int], object] = lambda _number: None
    """Python before each call, which is told its number."""
    scaler: torch.amp.GradScaler | None = None


@dataclass
class Course:
    """What a job did: a snapshot after each call."""

    snapshots: list[dict[str, Any]] = field(default_factory=list)


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value).__name__, repr(value)
    whole = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return bytes(whole), str(value.dtype), tuple(value.shape), tuple(value.stride())


def snapshot(job: Job, result: Any, gradients: bool) -> dict[str, Any]:
    leaves, spec = pytree.tree_flatten(result)
    found: dict[str, Any] = {"result": (list(map(bits, leaves)), str(spec))}
    names: dict[Any, str] = {}
    for name, parameter in job.model.named_parameters():
        names[parameter] = name
        found[name] = bits(parameter), parameter.requires_grad
        if gradients:
            found[f"{name}.grad"] = None if parameter.grad is None else bits(parameter.grad)
    found |= {name: bits(buffer) for name, buffer in job.model.named_buffers()}
    for number, optimizer in enumerate(job.optimizers):
        found[f"listed {number}"] = [names.get(one) for one in optimizer.state]
        for owner, state in optimizer.state.items():
            for key, value in state.items():
                found[f"{names.get(owner)}.{number}.{key}"] = bits(value)
        groups = [{**group, "params": 0} for group in optimizer.param_groups]
        found[f"groups {number}"] = repr(groups)
    found["generator"] = bits(torch.get_rng_state())
    if job.scaler is not None:
        found["scaler"] = repr(job.scaler.state_dict())
    return found


def plain_loop(job: Job, *, clip_grad_norm: float | None = None, accumulate: int = 1) -> Any:
    """One call after another of what `memplan.compile` stands for."""
    scaler, calls = job.scaler, 0

    def call(*batch: Any) -> Any:
        nonlocal calls
        if calls % accumulate == 0:
            for optimizer in job.optimizers:
                optimizer.zero_grad()
        result = job.loss_fn(*batch)
        (loss,) = (
            leaf
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        )
        (loss if scaler is None else scaler.scale(loss)).backward()
        calls += 1
        if calls % accumulate == 0:
            update(job, clip_grad_norm)
        return result

    return call


def update(job: Job, clip_grad_norm: float | None) -> None:
    scaler = job.scaler
    if clip_grad_norm is not None:
        for optimizer in job.optimizers:
            if scaler is not None:
                scaler.unscale_(optimizer)
        every = [one for o in job.optimizers for group in o.param_groups for one in group["params"]]
        nn.utils.clip_grad_norm_(every, clip_grad_norm)
    for optimizer in job.optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


def course_of(job: Job, call: Callable[..., Any], gradients: bool) -> Course:
    course = Course()
    torch.manual_seed(7)
    for number, batch in enumerate(job.batches):
        job.between(number)
        course.snapshots.append(snapshot(job, call(*batch), gradients))
    return course


def assert_as_plain(
    make: Callable[[], Job], *, keep_gradients: bool = False, **options: Any
) -> tuple[CompiledStep[...], Job]:
    """Trains the job plainly and compiled from the same start, and holds one against the other
    after each call."""
    loop = {key: options[key] for key in ("clip_grad_norm", "accumulate") if key in options}
    torch.manual_seed(1)
    plain = make()
    wanted = course_of(plain, plain_loop(plain, **loop), keep_gradients)
    torch.manual_seed(1)
    job = make()
    options = {"deadline_seconds": 0.2, **options}
    step = memplan.compile(
        job.loss_fn,
        optimizer=list(job.optimizers),
        scaler=job.scaler,
        keep_gradients=keep_gradients,
        **options,
    )
    found = course_of(job, step, keep_gradients)
    for number, (one, other) in enumerate(zip(wanted.snapshots, found.snapshots, strict=True)):
        assert one.keys() == other.keys(), f"call {number}: {one.keys() ^ other.keys()}"
        different = [key for key in one if one[key] != other[key]]
        assert not different, f"after call {number}: {different[:6]}\n{step.report()}"
    if not keep_gradients and options.get("accumulate", 1) == 1 and not step.report().fallback:
        for optimizer in job.optimizers:
            for group in optimizer.param_groups:
                assert all(one.grad is None for one in group["params"])
    return step, job


def assert_captured(step: CompiledStep[...], calls: int, programs: int = 1) -> None:
    """That all calls ran in graphs, of which there are so many."""
    report = step.report()
    assert not report.fallback, report
    assert report.plain_calls == 0
    assert report.compiled_calls == calls
    assert len(report.programs) == programs


def batches(shape: tuple[int, ...], classes: int = 4, count: int = 4) -> list[tuple[Any, ...]]:
    """Inputs and labels, each batch its own."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(shape, generator=generator),
            torch.randint(classes, (shape[0],), generator=generator),
        )
        for _ in range(count)
    ]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))


def classifier(
    build: Callable[[], nn.Module] = perceptron,
    make: Callable[[Any], Any] | None = None,
    shape: tuple[int, ...] = (5, 6),
    count: int = 4,
) -> Job:
    """A model that is trained with a cross entropy."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2) if make is None else make(model)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return Job(model, several, loss_fn, batches(shape, count=count))
