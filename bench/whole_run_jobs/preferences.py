"""Direct preference optimization (DPO): a policy, a frozen reference, pairs of answers."""

from __future__ import annotations

import argparse
import copy
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 32_000
BETA = 0.1
Pair = tuple[torch.Tensor, torch.Tensor]


class Pairs(Dataset[Pair]):
    """The answer that is preferred, and the other."""

    def __init__(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        self.lengths = [
            tuple(min(24 + int(draw.expovariate(1 / 150)), 900) for _ in range(2))
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Pair:
        better, worse = self.lengths[index]
        return torch.randint(5, WORDS, (better,)), torch.randint(5, WORDS, (worse,))


def padded(pairs: list[Pair]) -> torch.Tensor:
    """All that are preferred, then all others."""
    rows = [better for better, _ in pairs] + [worse for _, worse in pairs]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    there = (tokens != 0).long()
    logits = model(input_ids=tokens, attention_mask=there).logits[:, :-1]
    each = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    summed: torch.Tensor = (each * there[:, 1:]).sum(-1)
    return summed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        num_hidden_layers=6,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    policy = LlamaForCausalLM(config).cuda()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    pairs = Pairs(args.batches * args.batch_size, args.seed)
    for tokens in DataLoader(pairs, args.batch_size, shuffle=True, collate_fn=padded):
        there = tokens.cuda()
        with torch.no_grad():
            before = log_probabilities(reference, there)
        better, worse = (log_probabilities(policy, there) - before).chunk(2)
        loss = -nn.functional.logsigmoid(BETA * (better - worse)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
