"""Small training jobs, and how a compiled one is held against the plain one, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

import memplan.api as memplan
from memplan.runtime.compiled.compile import CompiledStep

Step = Callable[..., Any]


@dataclass
class Job:
    """A model, its optimizer, the step that trains it and what each call is given."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: Step
    batches: Sequence[tuple[Any, ...]]
    after: Callable[[], object] = lambda: None
    """Python between two steps."""


@dataclass
class Course:
    """What a job did."""

    results: list[Any] = field(default_factory=list)
    states: list[list[tuple[str, bytes]]] = field(default_factory=list)
    """After each step: gradients, weights, buffers and optimizer state."""


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) + str(tensor.dtype).encode()


def state_of(job: Job) -> list[tuple[str, bytes]]:
    found = []
    for name, parameter in job.model.named_parameters():
        found.append((name, bits(parameter)))
        gradient = parameter.grad
        found.append((f"{name}.grad", b"none" if gradient is None else bits(gradient)))
    found += [(name, bits(buffer)) for name, buffer in job.model.named_buffers()]
    for number, state in enumerate(job.optimizer.state.values()):
        for key, value in state.items():
            whole = bits(value) if isinstance(value, torch.Tensor) else repr(value).encode()
            found.append((f"state[{number}].{key}", whole))
    return found


def plain_result(result: Any) -> Any:
    """What a step returned, as bits and values."""
    leaves, spec = tree_flatten(result)
    return [
        bits(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf).__name__, repr(leaf))
        for leaf in leaves
    ], str(spec)


def course_of(job: Job, step: Step, seed: int = 7) -> Course:
    course = Course()
    torch.manual_seed(seed)
    for batch in job.batches:
        course.results.append(plain_result(step(*batch)))
        job.after()
        course.states.append(state_of(job))
    course.results.append(torch.rand(3).tolist())  # the generator went the same way
    return course


def run_both(make: Callable[[], Job], **options: Any) -> tuple[CompiledStep[..., Any], Course]:
    """Trains the job plainly and compiled from the same start, and holds them against each other
    after each step. Returns the compiled step and its course."""
    torch.manual_seed(1)
    plain_job = make()
    plain = course_of(plain_job, plain_job.step)
    torch.manual_seed(1)
    job = make()
    options = {"deadline_seconds": 0.5, **options}
    compiled = memplan.compile(job.step, model=job.model, optimizer=job.optimizer, **options)
    course = course_of(job, compiled)
    for number, (wanted, found) in enumerate(zip(plain.states, course.states, strict=True)):
        different = [name for (name, a), (_, b) in zip(wanted, found, strict=True) if a != b]
        assert not different, f"after step {number}: {different[:5]}"
    assert course.results == plain.results
    return compiled, course


def batches(shape: tuple[int, ...], classes: int = 4, count: int = 6) -> list[tuple[Any, ...]]:
    """Inputs and labels, each batch its own."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(shape, generator=generator),
            torch.randint(classes, (shape[0],), generator=generator),
        )
        for _ in range(count)
    ]
