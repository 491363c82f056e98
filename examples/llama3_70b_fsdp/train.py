"""Pretraining of Llama-3-70B sharded over all ranks: FSDP2, bf16 mixed precision, AdamW.

torchrun --nnodes 8 --nproc-per-node 8 … examples/llama3_70b_fsdp/train.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM


class Packed(Dataset[Tensor]):
    """Documents packed into rows of equal length (here: random tokens)."""

    def __init__(self, rows: int, length: int, vocab: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocab, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=1, help="rows per rank")
    parser.add_argument("--length", type=int, default=8192, help="tokens per row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=28672)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    return parser.parse_args()


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model, each rank with its shard; parameters exist in full nowhere."""
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard)
    model.to_empty(device=device)
    model.apply(initialise)
    # Its table is no parameter, and `to_empty` left it empty.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    elif module.__class__.__name__.endswith("RMSNorm"):
        nn.init.ones_(module.get_parameter("weight"))


def main() -> None:
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = build(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    rows = args.steps * args.batch_size * dist.get_world_size()
    data = Packed(rows, args.length, args.vocab)
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data))
    for step, tokens in enumerate(loader):
        tokens = tokens.to(device, non_blocking=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
