"""One training job: an ordinary script that knows nothing of memplan.

    python -m bench.gpu_run_jobs.train OUT.json --job llama-1b --batch 4 --steps 20

OUT gets the losses' bits, seconds of each step, and PyTorch's peaks; or `out_of_memory`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import gpu_turns
from bench.gpu_run_jobs.models import Decoder, Shape

GPT2 = Shape(12, 768, 3072, 12, 50257, 1024)
LLAMA = Shape(22, 2048, 5632, 32, 32000, 1024, gated=True)
MOE = Shape(8, 1024, 2816, 16, 32000, 1024, gated=True, experts=8)
SMALL = Shape(2, 64, 160, 4, 256, 32, gated=True)


WARM_UP = 8
"""Steps whose times do not count."""


@dataclass(frozen=True)
class Job:
    """What is trained. `batch` is of a micro-batch."""

    shape: Shape
    batch: int
    micro_batches: int = 1
    recompute: bool = False
    variable: bool = False
    """Every batch has a length of its own."""


JOBS = {
    "gpt2": Job(GPT2, 16),
    "llama-1b": Job(LLAMA, 4),
    "llama-1b-recomputed": Job(LLAMA, 16, recompute=True),
    "llama-1b-accumulated": Job(LLAMA, 4, micro_batches=4),
    "moe": Job(MOE, 8),
    "variable-length": Job(GPT2, 16, variable=True),
}


def batch_of(job: Job, draw: random.Random, generator: torch.Generator) -> torch.Tensor:
    """Tokens of one micro-batch, in the host's memory."""
    most = job.shape.length
    length = draw.randrange(most // 2, most + 1, 8) if job.variable else most
    return torch.randint(job.shape.vocabulary, (job.batch, length), generator=generator)


def train(job: Job, steps: int, device: torch.device) -> tuple[list[float], list[float]]:
    """The losses of every step, and its seconds."""
    torch.manual_seed(1)
    draw, generator = random.Random(2), torch.Generator().manual_seed(3)
    model = Decoder(job.shape, recompute=job.recompute).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = torch.zeros(steps, device=device)
    seconds = []
    for step in range(steps):
        if step == WARM_UP:
            gpu_turns.be_alone()
        start = time.perf_counter()
        for _ in range(job.micro_batches):
            tokens = batch_of(job, draw, generator).to(device)
            loss = model(tokens) / job.micro_batches
            loss.backward()
            losses[step] += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return losses.tolist(), seconds


def measure(job: Job, steps: int, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    try:
        losses, seconds = train(job, steps, device)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    except RuntimeError as error:  # what a pluggable allocator can raise
        if "out of memory" not in str(error):
            raise
        return {"out_of_memory": True}
    return {
        "losses": [loss.hex() for loss in losses],
        "seconds": seconds,
        "tokens_per_step": job.batch * job.micro_batches * job.shape.length,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved_peak_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "device_name": torch.cuda.get_device_name() if cuda else device.type,
        "device_total_bytes": torch.cuda.mem_get_info()[1] if cuda else 0,
        "torch": str(torch.__version__),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--job", choices=sorted(JOBS), required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    gpu_turns.share_from_first_use()
    # With `warn_only` attention would keep its usual kernel, which has other bits each time.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    job = JOBS[options.job]
    if options.small:
        job = replace(job, shape=replace(SMALL, experts=job.shape.experts), batch=2)
    if options.batch:
        job = replace(job, batch=options.batch)
    found = measure(job, options.steps, torch.device(options.device))
    options.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
