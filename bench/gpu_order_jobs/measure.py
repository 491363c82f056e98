"""One job, plain beside compiled: `python -m bench.gpu_order_jobs.measure OUT.json --job NAME …`.

The same model trains by its plain step and by `memplan.compile` of it, in turns, so that both see
the same clock and the same caches. With `--codegen inductor` the plain step's loss is compiled by
`torch.compile`. The result is written even when the task fails (`error` says
how). Peaks are all that PyTorch's allocator hands out in a step, weights, gradients, optimizer
state and inputs among it; on the CPU (a rehearsal), storages as the allocator's record shows them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import memplan
from bench import gpu_turns
from bench.gpu_measure import (
    bits,
    cuda_peak,
    cuda_seconds,
    deterministic,
    host_seconds,
    process_parser,
    write_measured,
)
from bench.gpu_recompute_jobs.models import JOBS, SEED, Training, build
from bench.recompute.tracker import measure, storage_bytes

WARM_UP = 4
"""Calls of each before any is measured."""
STEPS = 21
TRAINED = 4
DEADLINE_SECONDS = 60.0
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adam-loop": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, foreach=False),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=False),
}


class Job:
    """A model on its device, its optimizer, and its whole training step."""

    def __init__(self, options: argparse.Namespace, training: Training) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.training = training
        self.optimizer = OPTIMIZERS[options.optimizer](self.training.module.parameters())
        fused = options.codegen == "inductor"
        self.plain_loss = torch.compile(self.loss) if fused else self.loss

    def loss(self) -> torch.Tensor:
        training = self.training
        return training.loss(training.module(*training.inputs))

    def step(self) -> torch.Tensor:
        """Gradients are freed at its end: each may go as soon as its update is done."""
        loss = self.plain_loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def resident(self) -> list[torch.Tensor]:
        """Everything that is there before a step."""
        module = self.training.module
        state = [
            value
            for held in self.optimizer.state.values()
            for value in held.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*module.parameters(), *module.buffers(), *self.training.inputs, *state]

    def peak(self, step: Callable[[], object]) -> int:
        """Most bytes allocated during a step."""
        self.optimizer.zero_grad()
        if self.device.type != "cuda":
            return measure(step, self.resident()).peak_bytes
        return cuda_peak(step)

    def seconds(self, step: Callable[[], object]) -> float:
        return cuda_seconds(step) if self.device.type == "cuda" else host_seconds(step)

    def trajectory(self, step: Callable[[], torch.Tensor], state: dict[str, Any]) -> list[Any]:
        """Losses and the sums of bits of weights and optimizer state, from `state`, on kernels that
        give the same bits each time."""
        module, optimizer = self.training.module, self.optimizer
        module.load_state_dict(state["model"])
        with torch.no_grad():  # in place: a compiled step holds on to these tensors
            for held, saved in zip(optimizer.state.values(), state["optimizer"], strict=True):
                for key, value in saved.items():
                    held[key].copy_(value)
        torch.manual_seed(SEED)
        losses = [float(step()) for _ in range(TRAINED)]
        states = [t for held in optimizer.state.values() for t in held.values()]
        return [*losses, *map(bits, module.state_dict().values()), *map(bits, states)]

    def saved_state(self) -> dict[str, Any]:
        def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

        return {
            "model": copied(self.training.module.state_dict()),
            "optimizer": [copied(held) for held in self.optimizer.state.values()],
        }


def guard_less(compiled: Any) -> None:
    """Before PyTorch 2.13 a step runs plainly: guards of those releases leave out some of what a
    program may change, and `strict_guards` cannot add it. This program changes nothing."""
    if compiled._fallback:
        compiled._fallback = ""
        stand_in: Any = ModuleType("memplan.runtime.graph.strict_guards")
        stand_in.PATCHES, stand_in.pop_queries = (), list
        sys.modules[stand_in.__name__] = stand_in


def measured(job: Job) -> dict[str, Any]:
    """The plain step and the compiled one: peaks, times in turns, and whether the bits agree."""
    options = job.options
    compiled = memplan.compile(
        job.loss,
        optimizer=job.optimizer,
        deadline_seconds=options.deadline,
        budget=options.budget_bytes,
        codegen=options.codegen,
    )
    guard_less(compiled)
    began = time.perf_counter()
    with deterministic():
        for _ in range(WARM_UP):
            compiled()
        seconds = time.perf_counter() - began
        report = compiled.report()
        if report.fallback or not report.programs:
            return {"error": str(report)}
        state = job.saved_state()
        with_order = job.trajectory(compiled, state)
        plainly = job.trajectory(job.step, state)
        repeated = job.trajectory(job.step, state)
        with gpu_turns.alone():
            plain, ordered = _in_turns(job, compiled, options.steps)
        peaks = {"plain": job.peak(job.step), "compiled": job.peak(compiled)}
    report = compiled.report()
    *earlier, program = report.programs
    return {
        "optimizer": options.optimizer,
        "codegen": options.codegen,
        "budget_bytes": options.budget_bytes,
        "operators": program.operators,
        "recomputed": program.recomputed,
        "resident_bytes": storage_bytes(job.resident()),
        "compile_seconds": seconds,
        "order_seconds": program.order_seconds,
        "plain": {"peak_bytes": peaks["plain"], "seconds": statistics.median(plain)},
        "compiled": {
            "peak_bytes": peaks["compiled"],
            "seconds": statistics.median(ordered),
            "promised_bytes": program.ordered_peak_bytes,
            "lower_bound_bytes": program.lower_bound_bytes,
            "program_order_bytes": program.plain_peak_bytes,
        },
        "added_fraction": statistics.median(b / a - 1 for a, b in zip(plain, ordered, strict=True)),
        "compiled_calls": report.compiled_calls,
        "captured_again": len(earlier),
        "identical": with_order == plainly,
        "loss_difference": max(
            abs(a - b) / abs(b)
            for a, b in zip(with_order[:TRAINED], plainly[:TRAINED], strict=True)
        ),
        "repeatable": plainly == repeated,
    }


def _in_turns(
    job: Job, compiled: Callable[[], object], steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of plain and of compiled steps, one after the other."""
    plain, ordered = [], []
    for _ in range(2):
        job.step()
        compiled()
    for _ in range(steps):
        plain.append(job.seconds(job.step))
        ordered.append(job.seconds(compiled))
    return plain, ordered


def parser() -> argparse.ArgumentParser:
    parser = process_parser(__doc__, JOBS)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--budget-bytes", type=int)
    parser.add_argument("--deadline", type=float, default=DEADLINE_SECONDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    return parser


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)

    def measure_job() -> dict[str, Any]:
        training = build(options.job, torch.device(options.device), small=options.small)
        return measured(Job(options, training))

    return write_measured(options, measure_job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
