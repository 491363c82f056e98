"""How fast a trace file of 300,000 events is written and read (`trace_load.json`)."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.results import write_result
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Phase, Role, Trace, TraceMeta
from memplan.types.trace_file import load_trace, save_trace

EVENTS = 300_000
REPEATS = 7
LAYERS = 48


def training_trace(events: int = EVENTS) -> Trace:
    """A trace shaped like a transformer's training: per layer a few activations kept for the
    backward pass and as many temporaries, with modules, operators and source lines."""
    builder = TraceBuilder()
    step = 0
    while len(builder) < events:
        builder.step = step
        kept: list[tuple[int, int]] = []
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            builder.phase = phase
            for layer in range(LAYERS):
                builder.module = builder.intern(f"Model.layers.{layer}")
                for part in range(8):
                    builder.source = builder.intern(f"model.py:{100 + part}")
                    builder.begin_op(f"aten::op{part}", reads=[s for s, _ in kept[-2:]])
                    nbytes = 512 * (1 + part * 37 + layer)
                    storage = builder.new_storage(role=Role.UNKNOWN, dtype="float32", shape="8x512")
                    builder.append(EventKind.ALLOC, storage, nbytes)
                    builder.op_writes([storage])
                    if phase is Phase.FORWARD and part % 2:
                        kept.append((storage, nbytes))
                    else:
                        builder.append(EventKind.FREE, storage, nbytes)
                    if phase is Phase.BACKWARD and part % 2:
                        builder.append(EventKind.FREE, *kept.pop())
        step += 1
    return builder.build(TraceMeta(optimizer_steps=step))


def median_seconds(action: Callable[[], object]) -> float:
    """Median wall-clock seconds of one call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    trace = training_trace()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.trace"
        save = median_seconds(lambda: save_trace(trace, path, overwrite=True))
        load = median_seconds(lambda: load_trace(path))
        data = {
            "events": len(trace),
            "ops": len(trace.ops),
            "file_bytes": path.stat().st_size,
            "seconds": load,
            "save_seconds": save,
        }
    print(write_result("trace_load", data).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
