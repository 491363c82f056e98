"""One training loop for every GPU job. An ordinary script: it knows nothing of memplan.

python train.py --model gpt2 --batch 8 --length 512 --precision amp-fp16 --optimizer adamw
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from models import BACKENDS, MODELS, Knobs  # type: ignore[import-not-found]
from torch.optim import Optimizer
from torch.utils.data import DataLoader

PRECISIONS = ("fp32", "amp-fp16", "amp-bf16", "bf16")
COMPILERS = ("", "aot_eager", "inductor", "reduce-overhead", "max-autotune-no-cudagraphs")
OPTIMIZERS = ("sgd", "adam", "adamw", "adamw-fused")


def make_optimizer(name: str, model: torch.nn.Module) -> Optimizer:
    parameters = model.parameters()
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True if name == "adamw-fused" else None)


def autocast(precision: str, device: str) -> AbstractContextManager[Any]:
    if not precision.startswith("amp"):
        return nullcontext()
    dtype = torch.float16 if precision == "amp-fp16" else torch.bfloat16
    return torch.autocast(device, dtype)


def compile_in_place(model: torch.nn.Module, how: str) -> None:
    """By a backend, or by Inductor in a mode."""
    if how in ("aot_eager", "inductor"):
        model.compile(backend=how)
    else:
        model.compile(mode=how)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device(options.device)
    knobs = Knobs(
        options.batch, options.length, options.dropout, options.sdpa, options.mask,
        options.checkpoint, options.layers,
    )  # fmt: skip
    model, sample, loss_of = MODELS[options.model](knobs)
    if options.precision == "bf16":
        model = model.to(torch.bfloat16)
    if options.freeze:
        for weight in model.parameters():
            weight.requires_grad_(weight.dim() < 2)
    model = model.to(device)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    if options.compile:
        compile_in_place(model, options.compile)
    optimizer = make_optimizer(options.optimizer, model)
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "amp-fp16")
    micro_batches: list[dict[str, torch.Tensor]] = [sample] * (options.steps * options.accumulate)
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(
        micro_batches,  # type: ignore[arg-type]
        batch_size=None,
        pin_memory=device.type == "cuda",
    )

    for number, host_batch in enumerate(loader, start=1):
        batch = {name: value.to(device, non_blocking=True) for name, value in host_batch.items()}
        if "images" in batch and options.precision == "bf16":
            batch["images"] = batch["images"].to(torch.bfloat16)
        if "images" in batch and options.channels_last:
            batch["images"] = batch["images"].to(memory_format=torch.channels_last)
        with autocast(options.precision, device.type):
            loss = loss_of(model, batch) / options.accumulate
        scaler.scale(loss).backward()
        if number % options.accumulate:
            continue
        if options.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {number // options.accumulate}: loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens, or pixels of a side")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--sdpa", choices=sorted(BACKENDS), default="")
    parser.add_argument("--mask", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--freeze", action="store_true", help="train biases and norms only")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", choices=COMPILERS, default="")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
