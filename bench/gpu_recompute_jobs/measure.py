"""One task of one job, measured: `python -m bench.gpu_recompute_jobs.measure OUT.json …`.

Tasks: `reference` (the plain step, per-block checkpointing, and the least peak that can be had),
`budget` (a plan for `--bytes`, beside the plain step and, with `--per-block`, beside per-block
checkpointing) and `pytorch` (its own memory budget, a fraction of its plain activations).

Many such processes may plan at the same time; what is timed is alone on the card. The result is
written even when the task fails (`error` says how).

Peaks count what `auto_checkpoint` promises: all that PyTorch's allocator hands out in a step, less
what lay on the device beside weights, buffers and inputs before the first one (the targets).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol
from unittest import mock

import torch

from bench.gpu_measure import (
    bits,
    cuda_peak,
    cuda_seconds,
    deterministic,
    host_seconds,
    process_parser,
    write_measured,
)
from bench.gpu_recompute_jobs.models import JOBS, SEED, Training, build, checkpointed
from bench.gpu_turns import alone
from memplan.runtime.op_timing import CalledOps

MOST_ADDED = 100.0
"""Times the step's time, where there is no budget: the least peak, whatever it takes."""
WARM_UP = 3
"""Steps before any is measured; the first also checks what is recomputed."""
STEPS = 7
TRAINED = 3
"""Steps of the comparison to the bit."""
LEARNING_RATE = 1e-3


class Meter(Protocol):
    """Measures steps on one device."""

    def outside(self, training: Training) -> int:
        """Bytes that lie there beside what a promise counts; asked before the first step."""

    def peak(self, step: Callable[[], object]) -> int:
        """Most bytes allocated during a step."""

    def seconds(self, step: Callable[[], object]) -> float:
        """Time of one step."""


class CudaMeter:
    """PyTorch's allocator and CUDA events."""

    def outside(self, training: Training) -> int:
        return int(torch.cuda.memory_allocated()) - training.resident_bytes()

    def peak(self, step: Callable[[], object]) -> int:
        return cuda_peak(step)

    def seconds(self, step: Callable[[], object]) -> float:
        return cuda_seconds(step)


class HostMeter:
    """For a try without a GPU: storages as a dispatch mode sees them."""

    def __init__(self, training: Training) -> None:
        module = training.module
        self._resident = [*module.parameters(), *module.buffers(), *training.inputs]

    def outside(self, training: Training) -> int:
        return 0

    def peak(self, step: Callable[[], object]) -> int:
        from bench.recompute.tracker import dispatched_peak, storage_bytes

        return storage_bytes(self._resident) + dispatched_peak(step, self._resident)

    def seconds(self, step: Callable[[], object]) -> float:
        return host_seconds(step)


class Task:
    """A job on its device, and what is asked of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.training = build(options.job, self.device, small=options.small)
        on_cuda = self.device.type == "cuda"
        self.meter: Meter = CudaMeter() if on_cuda else HostMeter(self.training)
        self.outside = self.meter.outside(self.training)

    def measured(self, step: Callable[[], object] | None = None) -> dict[str, Any]:
        """Peak and median time of a step, warm."""
        step = step or self.training.step
        for _ in range(WARM_UP):
            step()
        times = [self.meter.seconds(step) for _ in range(STEPS)]
        self.training.module.zero_grad(set_to_none=True)
        allocated = self.meter.peak(step)
        return {
            "peak_bytes": allocated - self.outside,
            "allocated_peak_bytes": allocated,
            "seconds": statistics.median(times),
            "fastest_seconds": min(times),
        }

    def per_block(self) -> dict[str, Any]:
        with checkpointed(self.training.blocks):
            return self.measured()

    def plan(self, budget: int | None) -> tuple[Any, dict[str, Any]]:
        """What `auto_checkpoint` put into effect, and what it promises."""
        import memplan

        began = time.perf_counter()
        with operators_timed(alone()):
            applied = memplan.auto_checkpoint(
                self.training.module,
                *self.training.inputs,
                loss=self.training.loss,
                output_held=False,
                budget=budget,
                most_added=MOST_ADDED,
            )
        return applied, {
            "plan_seconds": time.perf_counter() - began,
            "plain_peak_bytes": applied.plain_peak_bytes,
            "peak_bytes": applied.peak_bytes,
            "added_fraction": applied.added_fraction,
        }

    def trajectory(self, state: dict[str, torch.Tensor]) -> list[Any]:
        """Losses and the weights' sums of bits over steps of SGD from `state`, on kernels that give
        the same bits each time."""
        module = self.training.module
        module.load_state_dict(state)
        torch.manual_seed(SEED)
        losses = []
        with deterministic():
            for _ in range(TRAINED):
                losses.append(self.training.step().item())
                with torch.no_grad():
                    for parameter in module.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
        return [*losses, *(bits(tensor) for tensor in module.state_dict().values())]


def reference(task: Task) -> dict[str, Any]:
    applied, promised = task.plan(None)
    with alone():
        least = task.measured()
        applied.remove()
        return {
            "plain": task.measured(),
            "per_block": task.per_block(),
            "least": {**least, "promised": promised},
        }


def under_budget(task: Task) -> dict[str, Any]:
    budget = task.options.bytes
    state = {name: t.to("cpu", copy=True) for name, t in task.training.module.state_dict().items()}
    applied, promised = task.plan(budget)
    found: dict[str, Any] = {"budget_bytes": budget, "promised": promised}
    with alone():
        found["planned"] = task.measured()
        with_plan = task.trajectory(state)
        applied.remove()
        found["plain"] = task.measured()
        without = task.trajectory(state)
        found["identical"] = with_plan == without
        found["repeatable"] = without == task.trajectory(state)
        if task.options.per_block:
            found["per_block"] = task.per_block()
    found["added_fraction"] = found["planned"]["seconds"] / found["plain"]["seconds"] - 1
    return found


def pytorch(task: Task) -> dict[str, Any]:
    """Compiled with `activation_memory_budget`; the plain compiled step has the fraction 1."""
    from torch._functorch import config

    training = task.training

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        return training.loss(training.module(*inputs))

    with config.patch(activation_memory_budget=task.options.fraction):
        compiled = torch.compile(forward)

        def step() -> None:
            training.module.zero_grad(set_to_none=True)
            compiled(*training.inputs).backward()

        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        with alone():
            measured = task.measured(step)
    return {"fraction": task.options.fraction, "compile_seconds": seconds, **measured}


TASKS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "reference": reference,
    "budget": under_budget,
    "pytorch": pytorch,
}


@contextlib.contextmanager
def operators_timed(within: AbstractContextManager[None]) -> Iterator[None]:
    """Inside, planning times its operators within `within`, and the rest of it outside."""
    timed = CalledOps.seconds

    def seconds(*arguments: Any) -> Any:
        with within:
            found = timed(*arguments)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return found

    with mock.patch.object(CalledOps, "seconds", seconds):
        yield


def parser() -> argparse.ArgumentParser:
    parser = process_parser(__doc__, JOBS)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--per-block", action="store_true")
    return parser


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    return write_measured(options, lambda: TASKS[options.task](Task(options)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
