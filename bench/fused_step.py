"""Whole training steps in fused kernels beside plain `torch.compile`, on the CPU.

    python -m bench.fused_step [NAME…]

Six models at batch 1 with Adam. The plain side compiles the loss function with Inductor as it
comes and then does `zero_grad`, `backward` and `optimizer.step()`; the other is
`memplan.compile(loss_fn, optimizer=…, codegen="inductor")` of the same function, model and
optimizer. For each: the peak of a real step by the CPU allocator's record, the time of steps in
turns, and what it takes to the end of the first step, each side with empty caches: seconds of the
clock, and of the processor with the C++ compilers, which other work on the machine changes little.
Each model is a process of its own. Writes `bench/results/fused_step.json` after each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan
from bench.gpu_jobs.models import UNet
from bench.gpu_measure import host_seconds
from bench.process import measured_apart
from bench.recompute.tracker import measure, storage_bytes
from bench.results import write_result
from memplan.capturing.standins.adapters import make_torchvision_importable

SEED = 1729
STEPS = 11
WARM_UP = 3
DEADLINE_SECONDS = 2.0
TOKENS = 128

Loss = Callable[[], Tensor]


def _language(model: nn.Module, vocabulary: int) -> tuple[nn.Module, Loss]:
    tokens = torch.randint(vocabulary, (1, TOKENS))

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten())

    return model, loss


def _gpt2() -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _language(GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False)), 50257)


def _bert() -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    return _language(BertForMaskedLM(BertConfig(num_hidden_layers=4)), 30522)


def _llama() -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return _language(LlamaForCausalLM(config), 32000)


def _torchvision(name: str) -> tuple[nn.Module, Loss]:
    make_torchvision_importable()
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    picture, label = torch.randn(1, 3, 224, 224), torch.tensor([3])
    return model, lambda: F.cross_entropy(model(picture), label)


def _unet() -> tuple[nn.Module, Loss]:
    model = UNet()
    picture, labels = torch.randn(1, 3, 128, 128), torch.randint(2, (1, 128, 128))
    return model, lambda: F.cross_entropy(model(picture), labels)


JOBS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "gpt2_4_layers": _gpt2,
    "bert_4_layers": _bert,
    "llama_4_layers": _llama,
    "vit_b_16": lambda: _torchvision("vit_b_16"),
    "resnet50": lambda: _torchvision("resnet50"),
    "unet": _unet,
}


class Job:
    """A model that both sides train."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Loss]]) -> None:
        torch.manual_seed(SEED)
        self.model, self.loss = make()
        self.model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)

    def sides(self) -> tuple[Callable[[], Any], memplan.CompiledStep[[]]]:
        """The plain step, and memplan's."""
        compiled = torch.compile(self.loss)

        def plain() -> Tensor:
            self.optimizer.zero_grad()
            loss = compiled()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        ours = memplan.compile(
            self.loss,
            optimizer=self.optimizer,
            codegen="inductor",
            deadline_seconds=DEADLINE_SECONDS,
        )
        return plain, ours

    def peak(self, step: Callable[[], object]) -> dict[str, int]:
        """`peak_bytes` of all that the allocator hands out; `storage_bytes` without the scratch
        memory of operators, of which an update is one on one side."""
        self.optimizer.zero_grad()
        gc.collect()
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        resident = [*self.model.parameters(), *self.model.buffers(), *states]
        found = measure(step, resident)
        every = found.base_bytes + found.allocator_bytes
        return {"peak_bytes": every, "storage_bytes": found.peak_bytes}


def one(name: str, out: Path) -> None:
    """Measures a job in this process."""
    # C++ compilers are then children of this process, whose time is known.
    torch._inductor.config.compile_threads = 1
    small = Job(lambda: _small())
    for step in small.sides():
        step()  # what the compilers import and build once is nobody's
    job = Job(JOBS[name])
    states = job.sides()
    compiling = [_with_empty_caches(step) for step in states]
    _, ours = states
    for step in states:
        for _ in range(WARM_UP - 1):
            step()
        job.optimizer.zero_grad()
    report = ours.report()
    if report.fallback or len(report.programs) != 1:
        raise RuntimeError(str(report))
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(STEPS):
        for found, step in zip(seconds, states, strict=True):
            found.append(host_seconds(step))
            job.optimizer.zero_grad()
    peaks = [job.peak(step) for step in states]
    (program,) = report.programs
    result = {
        "resident_bytes": storage_bytes([*job.model.parameters(), *job.model.buffers()]),
        "plain": {
            **peaks[0],
            "seconds": statistics.median(seconds[0]),
            **compiling[0],
        },
        "fused": {
            **peaks[1],
            "promised_bytes": program.ordered_peak_bytes,
            "seconds": statistics.median(seconds[1]),
            **compiling[1],
        },
        "added_fraction": statistics.median(
            b / a - 1 for a, b in zip(seconds[0], seconds[1], strict=True)
        ),
    }
    out.write_text(json.dumps(result), encoding="utf-8")


def _small() -> tuple[nn.Module, Loss]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    return model, lambda: model(x).square().mean()


def _with_empty_caches(step: Callable[[], object]) -> dict[str, float]:
    """What a first step takes."""
    from torch._inductor.utils import fresh_inductor_cache

    before = _processor_seconds()
    with fresh_inductor_cache():
        seconds = host_seconds(step)
    return {
        "compile_seconds": seconds,
        "compile_processor_seconds": _processor_seconds() - before,
    }


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run(name: str) -> dict[str, Any]:
    found: dict[str, Any] = measured_apart("bench.fused_step", name)
    plain, fused = found["plain"], found["fused"]
    print(
        f"{name:16s} peak {plain['peak_bytes'] / 2**20:.1f} -> {fused['peak_bytes'] / 2**20:.1f} "
        f"MiB (promised {fused['promised_bytes'] / 2**20:.1f}), step "
        f"{1e3 * plain['seconds']:.0f} -> {1e3 * fused['seconds']:.0f} ms, compile "
        f"{plain['compile_seconds']:.0f} -> {fused['compile_seconds']:.0f} s "
        f"({plain['compile_processor_seconds']:.0f} -> "
        f"{fused['compile_processor_seconds']:.0f} s of the processor)",
        flush=True,
    )
    return found


def summarize(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask."""
    pairs = [(job["plain"], job["fused"]) for job in jobs.values()]
    ratios = [fused["peak_bytes"] / plain["peak_bytes"] for plain, fused in pairs]
    return {
        "jobs": len(jobs),
        "not_above_plain": sum(ratio <= 1 for ratio in ratios),
        "tenth_saved": sum(ratio <= 0.9 for ratio in ratios),
        "promises_kept": sum(
            fused["storage_bytes"] <= fused["promised_bytes"] for _, fused in pairs
        ),
        "slowest_added": max(job["added_fraction"] for job in jobs.values()),
        "compile_ratio": max(
            fused["compile_seconds"] / plain["compile_seconds"] for plain, fused in pairs
        ),
        "compile_processor_ratio": max(
            fused["compile_processor_seconds"] / plain["compile_processor_seconds"]
            for plain, fused in pairs
        ),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(JOBS))
    parser.add_argument("--out", type=Path, help="measure one job in this process")
    options = parser.parse_args(arguments)
    if options.out is not None:
        one(options.names[0], options.out)
        return 0
    began = time.perf_counter()
    jobs: dict[str, dict[str, Any]] = {}
    for name in options.names:
        jobs[name] = run(name)
        summary = {**summarize(jobs), "seconds": time.perf_counter() - began}
        write_result("fused_step", {"summary": summary, "jobs": jobs})
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
