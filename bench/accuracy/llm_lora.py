"""LoRA on phi-1.5 the way LitGPT's resource tables measured it, in plain PyTorch.

An ordinary script: it knows nothing of memplan. Weights and adapters in bf16, rank 8 and alpha 16
on query and value of a fused projection, dropout 0.05 before the adapter, the head's logits in
chunks of 128 positions and, as Fabric hands outputs back, in fp32, AdamW on the adapters,
gradients accumulated (over 128 samples there; the number does not change the peak).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

CHUNK = 128
LORA_RANK = 8
LORA_SCALE = 16 / LORA_RANK
LORA_DROPOUT = 0.05


@dataclass(frozen=True)
class Sizes:
    """phi-1.5; `rotary` is how many of a head's dimensions are rotated."""

    vocabulary: int = 51200
    hidden: int = 2048
    feed_forward: int = 8192
    layers: int = 24
    heads: int = 32
    rotary: int = 32
    positions: int = 2048


class LoraQueryValue(nn.Module):
    """A fused query-key-value projection with adapters on the query and the value."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.hidden = sizes.hidden
        self.linear = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.dropout = nn.Dropout(LORA_DROPOUT)
        self.lora_a = nn.Parameter(torch.randn(2 * LORA_RANK, sizes.hidden) * 0.01)
        self.lora_b = nn.Parameter(torch.zeros(2 * sizes.hidden, LORA_RANK))
        head = sizes.hidden // sizes.heads
        self.places = [i for i in range(3 * sizes.hidden) if (i // head) % 3 != 1]

    def with_zero_keys(self, update: Tensor) -> Tensor:
        """Spread `[batch, time, 2 x hidden]` over the interleaved `[batch, time, 3 x hidden]`."""
        update = update.transpose(0, 1)
        shape = (*update.shape[:-1], 3 * self.hidden)
        flat = update.new_zeros(shape).view(-1, 3 * self.hidden)
        places = torch.tensor(self.places, device=update.device)
        flat = flat.index_copy(1, places, update.reshape(-1, 2 * self.hidden))
        return flat.view(shape).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        pretrained: Tensor = self.linear(x)
        low = F.linear(self.dropout(x), self.lora_a)
        high = F.conv1d(low.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2)
        return pretrained + self.with_zero_keys(high.transpose(-2, -1)) * LORA_SCALE


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `[batch, heads, time, rotary]`, halves against each other."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).type_as(x)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.attn = LoraQueryValue(sizes)
        self.proj = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, hidden = x.shape
        head = hidden // self.sizes.heads
        qkv = self.attn(x).view(batch, time, self.sizes.heads, 3, head).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(batch, -1, time, head) for part in torch.split(qkv, 1, dim=2))
        rotary = self.sizes.rotary
        q = torch.cat((rotate(q[..., :rotary], cos, sin), q[..., rotary:]), dim=-1)
        k = torch.cat((rotate(k[..., :rotary], cos, sin), k[..., rotary:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.proj(y.transpose(1, 2).reshape(batch, time, hidden))
        return output


class Block(nn.Module):
    """Attention and feed-forward side by side, after one norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(sizes.hidden)
        self.attn = Attention(sizes)
        self.fc = nn.Linear(sizes.hidden, sizes.feed_forward)
        self.proj = nn.Linear(sizes.feed_forward, sizes.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        output: Tensor = self.proj(F.gelu(self.fc(n_1), approximate="tanh")) + h + x
        return output


class Phi(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary)
        theta = 10000 ** -(torch.arange(0, sizes.rotary, 2).float() / sizes.rotary)
        angles = torch.outer(torch.arange(sizes.positions).float(), theta).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Logits in chunks of `[batch, up to 128, vocabulary]`."""
        time = tokens.size(1)
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        return [self.lm_head(chunk) for chunk in torch.split(x, CHUNK, dim=1)]


def chunked_cross_entropy(logits: list[Tensor], targets: Tensor) -> Tensor:
    """The mean loss; each chunk has a softmax of its own."""
    flat = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    parts = [part.reshape(-1) for part in torch.split(targets, logits[0].size(1), dim=1)]
    losses = [
        F.cross_entropy(chunk, part, ignore_index=-1, reduction="none")
        for chunk, part in zip(flat, parts, strict=True)
    ]
    valid = sum(int((part != -1).sum()) for part in parts)
    return torch.cat(losses).sum() / max(1, valid)


def train(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    model = Phi(Sizes(layers=options.layers)).to(torch.bfloat16).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-4, weight_decay=0.01)
    for iteration in range(1, options.steps * options.accumulate + 1):
        tokens = torch.randint(0, 50000, (options.micro_batch_size, options.seq_len))
        inputs, targets = tokens.to(device), tokens.to(device)
        logits = [chunk.float() for chunk in model(inputs)]
        logits[-1] = logits[-1][..., :-1, :]
        loss = chunked_cross_entropy(logits, targets[..., 1:])
        (loss / options.accumulate).backward()
        if iteration % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=1044)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
