"""Small jobs run for real, on CPU processes over gloo."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.profiler import ProfilerActivity, profile

from tests import warm

ROOT = Path(__file__).parents[3]
Step = Callable[[], None]
Jobs = Mapping[str, Callable[[str], Step]]
Sizes = dict[str, list[int]]


def second_step(make: Callable[[str], Step]) -> list[int]:
    """Run a job for real: the sizes that its second step asks for."""
    torch.manual_seed(0)
    step = make("cpu")
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = prof.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in memory if event.nbytes() > 0]


def fork_ranks(jobs: Jobs, size: int, folder: Path) -> None:
    """One process for each rank, which share what is imported; each writes `SIZE-RANK.json`.

    Nothing may have computed before: threads do not survive a fork.
    """
    importlib.import_module("torch._dynamo")  # else each rank does, with its first optimizer
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _be(rank, jobs, size, folder)
        children.append(child)
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} of {size} failed")


def _be(rank: int, jobs: Jobs, size: int, folder: Path) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        _wait_for_gloo_s_threads()
        store = f"file://{folder}/store-{size}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        sizes = {name: second_step(make) for name, make in jobs.items()}
        (folder / f"{size}-{rank}.json").write_text(json.dumps(sizes))
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait_for_gloo_s_threads() -> None:
    """Gloo's thread lets go of a tensor at some time after the wait for it; the autograd engine
    adds to a gradient in place only where nobody else holds it. NCCL's threads hold no tensors."""
    real = functional.wait_tensor

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = real(tensor)
        while out._use_count() > 1:  # type: ignore[attr-defined]
            time.sleep(0)
        return out

    functional.wait_tensor = wait


def run_module(module: str, folder: Path) -> dict[tuple[int, int], Sizes]:
    """Run a module that forks ranks; the sizes of each job by world size and rank."""
    done = warm.run(ROOT, "-m", module, str(folder))
    assert done.returncode == 0, done.stderr
    found = {}
    for path in folder.glob("*.json"):
        size, rank = map(int, path.stem.split("-"))
        found[size, rank] = json.loads(path.read_text())
    return found
