"""A classifier on BERT: in the first epoch only its last layers are trained, then all."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

WORDS = 20_000


class Texts(Dataset[torch.Tensor]):
    def __init__(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        self.lengths = [min(8 + int(draw.expovariate(1 / 80)), 500) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index],), 5 + index % (WORDS - 5))


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(model: Any, loader: DataLoader[torch.Tensor]) -> None:
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=2e-5)
    for tokens in loader:
        there = tokens.cuda()
        labels = torch.zeros(len(there), dtype=torch.long, device="cuda")
        loss = model(input_ids=there, attention_mask=(there != 0).long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=WORDS,
        num_hidden_layers=6,
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=2048,
    )
    model = BertForSequenceClassification(config).cuda()
    texts = Texts(args.batches * args.batch_size, args.seed)
    drawn = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(texts, args.batch_size, shuffle=True, generator=drawn, collate_fn=padded)
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:4]):
        part.requires_grad_(False)
    train(model, loader)
    model.requires_grad_(True)
    train(model, loader)


if __name__ == "__main__":
    main()
