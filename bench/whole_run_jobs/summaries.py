"""T5 in a plain loop that writes summaries of its validation texts every so many steps."""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration

WORDS = 32_000


class Texts(Dataset[torch.Tensor]):
    def __init__(self, count: int, longest: int, seed: int) -> None:
        draw = random.Random(seed)
        self.lengths = [min(16 + int(draw.expovariate(1 / 120)), longest) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(5, WORDS, (self.lengths[index],))


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


@torch.no_grad()
def write_all(model: T5ForConditionalGeneration, loader: DataLoader[torch.Tensor]) -> None:
    model.eval()
    for tokens in loader:
        there = tokens.cuda()
        model.generate(there, attention_mask=(there != 0).long(), max_new_tokens=24)
    model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--eval-batches", type=int, default=20)
    parser.add_argument("--eval-batch-size", type=int, default=64)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = T5Config(
        vocab_size=WORDS,
        num_layers=4,
        d_model=512,
        d_ff=1024,
        num_heads=8,
        d_kv=64,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    texts = Texts(args.batches * args.batch_size, 500, args.seed)
    others = Texts(args.eval_batches * args.eval_batch_size, 800, args.seed + 1)
    train = DataLoader(texts, args.batch_size, shuffle=True, collate_fn=padded)
    validation = DataLoader(others, args.eval_batch_size, collate_fn=padded)
    for step, tokens in enumerate(train, start=1):
        there = tokens.cuda()
        labels = there[:, : max(there.shape[1] // 4, 1)].contiguous()
        model(input_ids=there, attention_mask=(there != 0).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0:
            write_all(model, validation)


if __name__ == "__main__":
    main()
