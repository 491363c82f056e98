"""MPT language models trained over many GPUs as llm-foundry's benchmark tables were measured.

An ordinary script in plain PyTorch, started once per GPU: it knows nothing of memplan. Sizes are
those of the tables' configurations (`scripts/train/yamls/pretrain/mpt-*.yaml`), confirmed by their
count of parameters: biases everywhere, learned positions, tied embeddings, 50,368 words.

FSDP shards each block and the rest over all ranks (here FSDP2; the tables are by Composer's FSDP);
bf16 for compute, gradients reduced in fp32 (`amp_bf16`) or bf16 (`bf16`, PURE); flash attention;
whole blocks checkpointed where the table says so; gradients of each micro-batch reduced; AdamW.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

WORDS = 50368
SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
"""Width, heads and blocks."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = (one.transpose(1, 2) for one in split.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class MPT(nn.Module):
    def __init__(self, size: str, positions: int, checkpointed: bool) -> None:
        super().__init__()
        width, heads, blocks = SIZES[size]
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.linear(self.norm(x), self.words.weight)


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.device("meta"):
        model = MPT(options.size, options.seq_len, options.checkpoint)
    reduced = torch.bfloat16 if options.pure else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (options.batch_size, options.seq_len)
    for _ in range(options.steps):
        for _ in range(options.accumulate):
            tokens = torch.randint(0, WORDS, shape).to(device)
            logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            del logits
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="texts of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--pure", action="store_true", help="gradients reduced in bf16")
    parser.add_argument("--steps", type=int, default=4)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
