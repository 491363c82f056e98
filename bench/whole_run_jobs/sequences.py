"""A plain loop over texts of different lengths, padded to the longest of each batch.

Lengths are drawn from a distribution, tokens at random; models are built from their configurations.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = 32_000
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_layer=6, n_embd=512, n_head=8, n_positions=2048)
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            num_hidden_layers=6,
            hidden_size=512,
            num_attention_heads=8,
            intermediate_size=2048,
            max_position_embeddings=2048,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            num_hidden_layers=6,
            hidden_size=512,
            intermediate_size=1536,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=2048,
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            num_layers=4,
            d_model=512,
            d_ff=1024,
            num_heads=8,
            d_kv=64,
            decoder_start_token_id=0,
        )
    ),
}


class Texts(Dataset[torch.Tensor]):
    def __init__(self, args: argparse.Namespace) -> None:
        draw = random.Random(args.seed)
        ways: dict[str, Callable[[], float]] = {
            "exponential": lambda: draw.expovariate(1 / args.mean),
            "lognormal": lambda: args.mean * draw.lognormvariate(-0.3, 0.8),
            "uniform": lambda: draw.uniform(0, 2 * args.mean),
        }
        drawn = ways[args.lengths]
        count = args.batches * args.batch_size
        self.lengths = [min(8 + int(drawn()), args.longest) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(5, WORDS, (self.lengths[index],))


class ByTokens(Sampler[list[int]]):
    """Batches of about as many tokens each, of texts of like length, in random order."""

    def __init__(self, lengths: list[int], most: int, seed: int) -> None:
        self.batches: list[list[int]] = [[]]
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            if (len(self.batches[-1]) + 1) * lengths[index] > most:
                self.batches.append([])
            self.batches[-1].append(index)
        random.Random(seed).shuffle(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    there = (tokens != 0).long()
    return {
        "input_ids": tokens,
        "attention_mask": there,
        "labels": tokens.masked_fill(there == 0, -100),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="gpt2")
    add("--lengths", choices=["exponential", "lognormal", "uniform"], default="exponential")
    add("--mean", type=float, default=120.0, help="of the lengths, about")
    add("--longest", type=int, default=1000)
    add("--batch-size", type=int, default=8)
    add("--batches", type=int, default=300)
    add("--by-tokens", type=int, default=0, metavar="N", help="batches of N tokens at most")
    add("--gradient-accumulation-steps", type=int, default=1)
    add("--workers", type=int, default=0)
    add("--amp", action="store_true")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    texts = Texts(args)
    batches: dict[str, Any] = {"batch_size": args.batch_size, "shuffle": True}
    if args.by_tokens:
        batches = {"batch_sampler": ByTokens(texts.lengths, args.by_tokens, args.seed)}
    loader = DataLoader(texts, collate_fn=padded, num_workers=args.workers, **batches)
    model = MODELS[args.model]().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for number, batch in enumerate(loader, start=1):
        there = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
            loss = model(**there).loss / args.gradient_accumulation_steps
        loss.backward()
        if number % args.gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
