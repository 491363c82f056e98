"""What following a job costs its process: CPU time of a training step with hooks and without.

    python -m bench.planned_hooks

Twelve layers with the modules of GPT-2, as narrow as can be, so that hooks stand out, on the CPU:
without memplan, while they are recorded (all modules are hooked), and under a plan (roots alone).
The steps take turns. Writes `bench/results/planned_hooks.json`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.planned_speed import build_library
from bench.results import write_result
from memplan.runtime.planned.library import DRIVER_VARIABLE, Library
from memplan.runtime.planned.phases import JobHooks
from memplan.runtime.planned.recording import Recording
from memplan.types.trace import Phase

ROUNDS = 150
LAYERS = 12
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, _, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(q * v))
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class Follower:
    """Does for a recording what a job does."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.phase = Phase.SETUP

    def entered(self, phase: Phase) -> None:
        self.phase = phase
        self.recording.mark(phase, "")

    resumed = entered

    def stepped(self) -> None:
        self.recording.stepped()

    def in_module(self, path: str) -> None:
        self.recording.mark(self.phase, path)


def measure() -> dict[str, Any]:
    path, driver = build_library()
    os.environ[DRIVER_VARIABLE] = str(driver)
    library = Library(path)
    library.free(library.malloc(1 << 20))
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(4, WIDTH)

    def step() -> float:
        start = time.thread_time()
        model(x).sum().backward()
        optimizer.step()
        return time.thread_time() - start

    return {"modules": sum(1 for _ in model.modules()), **_turns(step, library)}


def _turns(step: Callable[[], float], library: Library) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"plain": [], "recorded": [], "planned": []}
    for _ in range(ROUNDS):
        seconds["plain"].append(step())
        recording = Recording(library, [0])
        with JobHooks(Follower(recording)) as hooks:
            hooks.watch_all(modules=True)
            step()  # names its modules
            seconds["recorded"].append(step())
            hooks.watch_roots()
            seconds["planned"].append(step())
        recording.stop()
    plain = seconds["plain"]
    added = {
        way: statistics.median(a - b for a, b in zip(times, plain, strict=True))
        for way, times in seconds.items()
    }
    return {
        "plain_seconds": statistics.median(plain),
        "recorded_added_seconds": added["recorded"],
        "planned_added_seconds": added["planned"],
    }


if __name__ == "__main__":
    found = measure()
    print(found)
    write_result("planned_hooks", found)
