"""Small hand-made jobs whose every byte is known."""

from __future__ import annotations

from memplan.types.builder import TraceBuilder
from memplan.types.trace import (
    Assumption,
    EventKind,
    KernelChoice,
    Phase,
    Provenance,
    Role,
    Trace,
    TraceMeta,
)

MIB = 1 << 20


class Job:
    """Writes a training loop into a TraceBuilder."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()

    def at(self, phase: Phase, op: str, module: str = "", source: str = "", step: int = 0) -> None:
        builder = self.builder
        builder.phase, builder.step = phase, step
        builder.module, builder.source = builder.intern(module), builder.intern(source)
        builder.begin_op(op)

    def alloc(
        self,
        nbytes: int,
        role: Role = Role.UNKNOWN,
        *,
        name: str = "",
        shape: str = "",
        low: int | None = None,
        high: int | None = None,
    ) -> int:
        storage = self.builder.new_storage(role=role, name=name, dtype="float32", shape=shape)
        sure = low is None and high is None
        provenance = Provenance.OBSERVED if sure else Provenance.RULE
        self.builder.append(
            EventKind.ALLOC, storage, nbytes, low=low, high=high, provenance=provenance
        )
        return storage

    def free(self, storage: int) -> None:
        self.builder.append(EventKind.FREE, storage)

    def build(self, **meta: object) -> Trace:
        return self.builder.build(TraceMeta(**meta))  # type: ignore[arg-type]


def training_job(
    *, workspace: tuple[int, int, int] | None = None, steps: int = 2, op: str = "aten::mm"
) -> Trace:
    """A model of two 64 MiB weights, Adam, one input, one activation kept for the backward and one
    temporary per step. `workspace`: low, expected and high bytes of a library workspace of the
    operator `op`."""
    job = Job()
    job.at(Phase.SETUP, "aten::empty", "model", "train.py:3")
    weights = [job.alloc(64 * MIB, Role.PARAMETER, name=f"w{i}", shape="4096x4096") for i in (0, 1)]
    states: list[int] = []
    for step in range(steps):
        job.at(Phase.FORWARD, "aten::to", "", "train.py:8", step)
        batch = job.alloc(8 * MIB, Role.INPUT, shape="512x4096")
        job.at(Phase.FORWARD, op, "model.fc1", "train.py:10", step)
        temporary = job.alloc(24 * MIB, shape="1536x4096")
        scratch = None
        if workspace:
            scratch = job.alloc(workspace[1], Role.WORKSPACE, low=workspace[0], high=workspace[2])
        kept = job.alloc(32 * MIB, shape="2048x4096")
        job.free(temporary)
        job.at(Phase.BACKWARD, "aten::mm_backward", "model.fc1", "train.py:12", step)
        gradients = [job.alloc(64 * MIB, Role.GRADIENT, name=f"w{i}") for i in (0, 1)]
        job.free(kept)
        if scratch is not None:
            job.free(scratch)
        job.free(batch)
        job.at(Phase.OPTIMIZER, "aten::_foreach_add_", "", "train.py:13", step)
        if not states:
            states = [job.alloc(64 * MIB, Role.OPTIMIZER_STATE) for _ in range(4)]
        for gradient in gradients:
            job.free(gradient)
    for storage in (*states, *weights):
        job.free(storage)
    return job.build(
        torch_version="2.13.0",
        gpu="a100-80gb",
        command=["train.py"],
        optimizer_steps=steps,
        stop_reason="the step repeats",
        assumptions=[Assumption("routing", "Tokens spread evenly over the experts.", count=3)],
        kernels=[KernelChoice("aten::sdpa", "flash", "fp16, no mask", count=4)],
        notes=["made by hand"],
    )
