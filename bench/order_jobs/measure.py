"""What a real step on the CPU holds, in program order and in the planned one.

Both run through `memplan.compile`, each storage freed at its last use. The measure is that of the
recompute benchmark, from the CPU allocator's own record: storages as the dispatcher sees them. It
shares no code with memplan.
"""

from __future__ import annotations

import gc

import torch

from bench.order_jobs.models import Case, Training
from bench.recompute.tracker import measure
from memplan.api import compile as compile_step


def measured(case: Case, deadline_seconds: float) -> dict[str, int]:
    """Bytes at the peak of each order, and what the compiled step said that it would be."""
    result: dict[str, int] = {}
    for name, order in (("program", False), ("ordered", True)):
        torch.manual_seed(0)
        training = case.training()
        compiled = compile_step(
            training.loss_of_batch,
            optimizer=training.optimizer,
            order=order,
            deadline_seconds=deadline_seconds,
        )
        for _ in range(3):
            compiled()
        resident = _resident(training)
        result[f"{name}_bytes"] = measure(compiled, resident).peak_bytes
        [program] = compiled.report().programs
        result[f"predicted_{name}_bytes"] = program.ordered_peak_bytes
        del training, compiled, resident
        gc.collect()
    return result


def _resident(training: Training) -> list[torch.Tensor]:
    states = training.optimizer.state.values()
    state = [value for of in states for value in of.values() if isinstance(value, torch.Tensor)]
    model = training.model
    return [*model.parameters(), *model.buffers(), *state, *training.batch]
