"""Hand-made jobs: traces of steps whose requests are known to the byte."""

from __future__ import annotations

from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Phase, Trace, TraceMeta

KIB = 1024


class JobMaker:
    """Writes a trace step by step; storages by name."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.alive: dict[str, int] = {}

    def alloc(self, name: str, nbytes: int, *, stream: int = 0, shape: str = "") -> None:
        storage = self.builder.new_storage(shape=shape)
        self.builder.append(EventKind.ALLOC, storage, nbytes, stream=stream)
        self.alive[name] = storage

    def free(self, name: str) -> None:
        self.builder.append(EventKind.FREE, self.alive.pop(name))

    def trace(self) -> Trace:
        return self.builder.build(TraceMeta(torch_version="2.13.0", command=["train.py"]))


def training(steps: int = 4, layers: int = 3, *, hold_output: bool = False) -> Trace:
    """Parameters, then steps: activations of growing size, gradients that are freed at the next
    step's beginning, optimizer state in the first step. With `hold_output` the output of a step is
    released only once the next one's is there, as `out = model(x)` has it."""
    job = JobMaker()
    for layer in range(layers):
        job.alloc(f"weight {layer}", 100 * KIB)
    for step in range(steps):
        job.builder.step, job.builder.phase = step, Phase.FORWARD
        for layer in range(layers):
            if f"gradient {layer}" in job.alive:
                job.free(f"gradient {layer}")
        for layer in range(layers):
            job.builder.module = job.builder.intern(f"layers.{layer}")
            job.alloc("temporary", 30 * KIB)
            job.alloc(f"activation {layer}", (40 + 10 * layer) * KIB)
            job.free("temporary")
        if hold_output and step:
            job.alloc("new output", 500 * KIB)
            job.free("output")
            job.alive["output"] = job.alive.pop("new output")
        else:
            job.alloc("output", 500 * KIB)
        if not hold_output:
            job.free("output")
        job.builder.phase = Phase.BACKWARD
        for layer in reversed(range(layers)):
            job.builder.module = job.builder.intern(f"layers.{layer}")
            job.alloc("temporary", 55 * KIB)
            job.alloc(f"gradient {layer}", 100 * KIB)
            job.free("temporary")
            job.free(f"activation {layer}")
        job.builder.phase = Phase.OPTIMIZER
        for layer in range(layers):
            if not step:
                job.alloc(f"state {layer}", 200 * KIB)
            job.alloc("temporary", 100 * KIB)
            job.free("temporary")
    job.builder.step = steps
    job.builder.append(EventKind.MARK)
    return job.trace()
