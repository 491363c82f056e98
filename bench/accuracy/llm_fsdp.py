"""Pretraining of Llama-3.1-8B over eight GPUs the way torchtitan's team measured it.

An ordinary script in plain PyTorch, started once per GPU: it knows nothing of memplan. It follows
torchtitan's recipe of December 2024 (the published figure names commit 9dec370 of the 26th, in
`benchmarks/llama3_h100_202412_torchtitan.md`), by versions of those months of `train.py`,
`train_configs/llama3_8b.toml`, `torchtitan/parallelisms/parallelize_llama.py`,
`torchtitan/models/llama/model.py`, `torchtitan/models/norms.py` and `torchtitan/optimizer.py`, and
by pull requests 642 (logits in fp32 inside the loss) and 985 (its own norm until March 2025):

- FSDP2 around each block and the whole model; bf16 for compute, fp32 for reduction; the last block
  stays gathered after forward, and so does the root.
- Each block checkpointed per operator: every second matrix product and the attention are kept.
- Rotation by complex numbers; keys and values copied to all heads; norms in fp32.
- Cross entropy over all logits in fp32, the bf16 logits let go before backward.
- AdamW in fp32 in its foreach form, gradients clipped; no compilation. Collection of reference
  cycles only now and then.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}
COLLECT_EVERY = 50
LOG_EVERY = 10


@dataclass(frozen=True)
class Sizes:
    """Llama-3.1-8B."""

    vocabulary: int = 128256
    hidden: int = 4096
    feed_forward: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    positions: int = 8192

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def turns_of(sizes: Sizes) -> Tensor:
    """The rotation of each position and pair as complex numbers, `[positions, head / 2]`."""
    theta = 500_000 ** -(torch.arange(0, sizes.head, 2).float() / sizes.head)
    angles = torch.outer(torch.arange(sizes.positions), theta).float()
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary position embedding of `[batch, time, heads, head]`, neighbours paired."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * turns.view(1, x.shape[1], 1, -1)).flatten(3)
    return turned.type_as(x)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.wq = nn.Linear(sizes.hidden, sizes.heads * sizes.head, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False)
        self.wo = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)

    def all_heads(self, x: Tensor) -> Tensor:
        """`[batch, time, kv_heads, head]` copied to `[batch, time, heads, head]`."""
        batch, time, kv_heads, head = x.shape
        group = self.sizes.heads // kv_heads
        x = x.unsqueeze(3).expand(batch, time, kv_heads, group, head)
        return x.reshape(batch, time, kv_heads * group, head)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, time, _ = x.shape
        head = self.sizes.head
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = q.view(batch, time, -1, head)
        k = k.view(batch, time, -1, head)
        v = v.view(batch, time, -1, head)
        q, k = rotate_both(q, k, turns)
        keys, values = self.all_heads(k), self.all_heads(v)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous().view(batch, time, -1)
        projected: Tensor = self.wo(output)
        return projected


def rotate_both(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, turns), rotate(k, turns)


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.w2 = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return output


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm = RMSNorm(sizes.hidden)
        self.ffn_norm = RMSNorm(sizes.hidden)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Llama(nn.Module):
    """The decoder; embedding and head are separate weights."""

    turns: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.register_buffer("turns", turns_of(sizes))
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.layers)})
        self.norm = RMSNorm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    @torch.no_grad()
    def initialise(self) -> None:
        with torch.device(self.turns.device):
            self.turns = turns_of(self.sizes)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        h = self.norm(h)
        logits: Tensor = self.output(h)
        return logits


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Forward and recomputation of one block: which results of operators are kept."""
    products: dict[bool, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func == aten.mm.default:
            products[ctx.is_recompute] += 1
            kept = products[ctx.is_recompute] % 2 == 1
        else:
            kept = func in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    made: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    made = create_selective_checkpoint_contexts(policy)
    return made


def distribute(model: Llama, device: torch.device) -> None:
    """Checkpoint each block, then shard each and what is left over all ranks."""
    for name, block in list(model.layers.named_children()):
        wrapped = checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)
        model.layers.register_module(name, wrapped)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(model.layers) - 1
    for name, block in model.layers.items():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=int(name) < last)
    # The PyTorch of that time kept the root gathered whatever it was told.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens, and the same moved by one."""
    for _ in range(options.steps):
        text = torch.randint(0, 128000, (options.batch_size, options.seq_len + 1))
        yield text[:, :-1], text[:, 1:]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def train(options: argparse.Namespace) -> None:
    gc.disable()
    gc.collect(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    # Flash attention, as on the PyTorch of that time: releases from 2.10 on put cuDNN's before it.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.device("meta"):
        model = Llama(Sizes(layers=options.layers, positions=options.seq_len))
    distribute(model, device)
    model.to_empty(device=device)
    model.initialise()
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 200))
    losses = []
    for step, (tokens, labels) in enumerate(batches(options), start=1):
        if step % COLLECT_EVERY == 0:
            gc.collect(1)
        tokens, labels = tokens.to(device), labels.to(device)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = loss_of(logits, labels)
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        losses.append(loss)
        if step == 1 or step % LOG_EVERY == 0:
            mean = torch.tensor(sum(one.item() for one in losses) / len(losses), device=device)
            dist.all_reduce(mean)
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.3f}")
            losses.clear()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=2, help="texts per GPU")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
