"""What a compiled step needs and takes on the CPU, beside the plain one.

    python -m bench.compiled_step [NAME…]

Whole training steps with Adam (foreach off), gradients freed at the end of each, batch 1:
MobileNetV2 and ViT-B/16 of torchvision, a BERT of six layers, and a small GPT-2, which is also run
within a budget; and a deep GPT-2 of tiny layers with fused AdamW, whose step is all calls, as one
on a GPU is that waits for its host. For each the peak of a real step by the CPU allocator's record
(which shares no code with what promises it), the time of steps in turns, and whether losses,
weights and optimizer state are the same bits. Each is a process of its own. Writes
`bench/results/compiled_step.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bench.gpu_order import budget_for
from bench.gpu_order_jobs import measure
from bench.gpu_recompute_jobs.models import SEED, Training, build
from bench.process import measured_apart
from bench.results import write_result
from memplan.capturing.standins.adapters import make_torchvision_importable

DEADLINE_SECONDS = 60.0
STEPS = 5


def _torchvision(name: str) -> Training:
    make_torchvision_importable()
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    picture, label = torch.randn(1, 3, 224, 224), torch.tensor([3])

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out, label)

    return Training(model, (picture,), loss, ())


def _bert() -> Training:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(num_hidden_layers=6))
    tokens = torch.randint(30522, (1, 128))

    def loss(out: Any) -> Tensor:
        return F.cross_entropy(out.logits.flatten(0, 1), tokens.flatten())

    return Training(model, (tokens,), loss, ())


def _calls_only() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)  # nothing is large enough for two
    sizes = {"n_layer": 24, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(64, (1, 16))

    def loss(out: Any) -> Tensor:
        return F.cross_entropy(out.logits.flatten(0, 1), tokens.flatten())

    return Training(model, (tokens,), loss, ())


JOBS: dict[str, Callable[[], Training]] = {
    "small_gpt2": lambda: build("gpt2-medium", torch.device("cpu"), small=True),
    "mobilenet_v2": lambda: _torchvision("mobilenet_v2"),
    "bert_6_layers": _bert,
    "vit_b_16": lambda: _torchvision("vit_b_16"),
    "calls_only": _calls_only,
}
OPTIMIZERS = {"calls_only": "adamw-fused"}
"""Where it is not Adam."""


def one(name: str, out: Path, budget_bytes: int | None) -> None:
    """Measures a job in this process."""
    torch.manual_seed(SEED)
    training = JOBS[name]()
    training.module.train()
    options = argparse.Namespace(
        device="cpu", optimizer=OPTIMIZERS.get(name, "adam-loop"), codegen="eager",
        deadline=DEADLINE_SECONDS, steps=STEPS, budget_bytes=budget_bytes,
    )  # fmt: skip
    out.write_text(json.dumps(measure.measured(measure.Job(options, training))), encoding="utf-8")


def run(name: str, budget_bytes: int | None = None) -> dict[str, Any]:
    budget = [] if budget_bytes is None else ["--budget-bytes", str(budget_bytes)]
    found: dict[str, Any] = measured_apart("bench.compiled_step", name, *budget)
    if "error" in found:
        raise RuntimeError(f"{name}: {found['error']}")
    print(f"{name:16s} {line(found)}", flush=True)
    return found


def line(found: dict[str, Any]) -> str:
    plain, compiled = found["plain"], found["compiled"]
    return (
        f"peak {plain['peak_bytes'] / 2**20:.1f} -> {compiled['peak_bytes'] / 2**20:.1f} MiB, step "
        f"{1e3 * plain['seconds']:.0f} -> {1e3 * compiled['seconds']:.0f} ms, "
        f"{'same bits' if found['identical'] else 'OTHER BITS'}"
    )


def summarize(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask."""
    ordered = [job for job in jobs.values() if job["budget_bytes"] is None]
    limited = [job for job in jobs.values() if job["budget_bytes"] is not None]
    return {
        "jobs": len(jobs),
        "identical": sum(job["identical"] for job in jobs.values()),
        "not_above_plain": sum(
            job["compiled"]["peak_bytes"] <= job["plain"]["peak_bytes"] for job in ordered
        ),
        "ordered": len(ordered),
        "most_saved": max(
            1 - job["compiled"]["peak_bytes"] / job["plain"]["peak_bytes"] for job in ordered
        ),
        "slowest_added": max(job["added_fraction"] for job in ordered),
        "within_budget": sum(
            job["compiled"]["peak_bytes"] <= job["budget_bytes"] for job in limited
        ),
        "budgets": len(limited),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(JOBS))
    parser.add_argument("--out", type=Path, help="measure one job in this process")
    parser.add_argument("--budget-bytes", type=int)
    options = parser.parse_args(arguments)
    if options.out is not None:
        one(options.names[0], options.out, options.budget_bytes)
        return 0
    jobs = {name: run(name) for name in options.names}
    if "small_gpt2" in jobs:
        jobs["small_gpt2_budget"] = run("small_gpt2", budget_for(jobs["small_gpt2"]))
    summary = summarize(jobs)
    write_result("compiled_step", {"summary": summary, "jobs": jobs})
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
