"""A full fine-tune of Llama-3.2-3B on packed sequences the way torchtune measured it.

An ordinary script in plain PyTorch: it knows nothing of memplan. Everything in bf16, no
checkpointing, no compilation, norms and rotation in fp32, keys and values expanded to all heads,
fp32 logits, one plain cross entropy over them, `torch.optim.AdamW`, gradients set to None.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

IGNORE = -100


@dataclass(frozen=True)
class Sizes:
    """Llama-3.2-3B."""

    vocabulary: int = 128256
    hidden: int = 3072
    feed_forward: int = 8192
    layers: int = 28
    heads: int = 24
    kv_heads: int = 8
    head: int = 128
    positions: int = 131072


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class Rotary(nn.Module):
    """Rotary position embedding of `[batch, time, heads, head]`, neighbours paired, in fp32."""

    cache: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        theta = 500_000 ** -(torch.arange(0, sizes.head, 2).float() / sizes.head)
        angles = torch.outer(torch.arange(sizes.positions).float(), theta)
        cache = torch.stack([angles.cos(), angles.sin()], dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cos_sin = self.cache[positions].view(-1, pairs.size(1), 1, pairs.size(3), 2)
        turned = torch.stack(
            [
                pairs[..., 0] * cos_sin[..., 0] - pairs[..., 1] * cos_sin[..., 1],
                pairs[..., 1] * cos_sin[..., 0] + pairs[..., 0] * cos_sin[..., 1],
            ],
            -1,
        )
        return turned.flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = nn.Linear(sizes.hidden, sizes.heads * sizes.head, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False)
        self.output_proj = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)
        self.rotary = rotary

    def all_heads(self, x: Tensor) -> Tensor:
        """`[batch, time, kv_heads, head]` copied to `[batch, heads, time, head]`."""
        batch, time = x.shape[:2]
        sizes = self.sizes
        group = sizes.heads // sizes.kv_heads
        x = x.view(batch, time, sizes.kv_heads, 1, sizes.head)
        x = x.expand(batch, time, sizes.kv_heads, group, sizes.head)
        return x.reshape(batch, time, -1, sizes.head).transpose(1, 2)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, time, _ = x.shape
        sizes = self.sizes
        q = self.q_proj(x).view(batch, time, sizes.heads, sizes.head)
        q = self.rotary(q, positions).transpose(1, 2)
        k = self.k_proj(x)
        v = self.v_proj(x)
        k = self.rotary(k.view(batch, time, -1, sizes.head), positions)
        k = self.all_heads(k)
        v = self.all_heads(v)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.output_proj(
            output.transpose(1, 2).contiguous().view(batch, time, -1)
        )
        return projected


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.w2 = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.w1(x))
        h = h * self.w3(x)
        output: Tensor = self.w2(h)
        return output


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.sa_norm = RMSNorm(sizes.hidden)
        self.attn = Attention(sizes, rotary)
        self.mlp_norm = RMSNorm(sizes.hidden)
        self.mlp = FeedForward(sizes)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = self.sa_norm(x)
        attn_out = self.attn(h, positions)
        h = attn_out + x
        mlp_out = self.mlp(self.mlp_norm(h))
        out: Tensor = h + mlp_out
        return out


class Llama(nn.Module):
    """The decoder; its head is the embedding's weight."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        rotary = Rotary(sizes)
        self.layers = nn.ModuleList(Layer(sizes, rotary) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, positions)
        h = self.norm(h)
        return F.linear(h, self.tok_embeddings.weight).float()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token; the logits are let go before backward."""
    labels = batch.pop("labels")
    logits = model(**batch)
    ignored = torch.full((labels.shape[0], 1), IGNORE, device=labels.device)
    labels = torch.hstack((labels[..., 1:], ignored)).reshape(-1)
    logits = logits.reshape(-1, logits.size(-1))
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE)
    del logits
    return loss


def train(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Llama(Sizes(layers=options.layers))
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    shape = (options.batch_size, options.seq_len)
    for _ in range(options.steps):
        tokens = torch.randint(0, 128000, shape)
        positions = torch.arange(options.seq_len).expand(shape).contiguous()
        batch = {"tokens": tokens, "positions": positions, "labels": tokens.clone()}
        batch = {name: value.to(device) for name, value in batch.items()}
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
