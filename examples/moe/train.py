"""Train a small mixture of experts (Qwen3-MoE's architecture) in bf16."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens per row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--experts-per-token", type=int, default=4)
    parser.add_argument("--expert-width", type=int, default=512)
    parser.add_argument("--implementation", choices=["grouped_mm", "eager"], default="grouped_mm")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        num_experts=args.experts,
        num_experts_per_tok=args.experts_per_token,
        moe_intermediate_size=args.expert_width,
        output_router_logits=True,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation=args.implementation
    ).to(args.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    loader = DataLoader(
        Packed(args.steps * args.batch_size, args.length, args.vocab),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=args.device == "cuda",
    )
    for step, tokens in enumerate(loader):
        tokens = tokens.to(args.device, non_blocking=True)
        optimizer.zero_grad()
        outputs = model(input_ids=tokens, labels=tokens)
        outputs.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss, balance = outputs.loss.item(), outputs.aux_loss.item()
        print(f"step {step}: loss {loss:.3f}, router {balance:.3f}, gradient norm {norm:.2f}")


if __name__ == "__main__":
    main()
