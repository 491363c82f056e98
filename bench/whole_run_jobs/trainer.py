"""Transformers' Trainer on texts of different lengths, through a tokenizer and its collator."""

from __future__ import annotations

import random
import sys
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

WORDS = 2000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST = 480
TEXTS = 32 * 300


def make_tokenizer() -> PreTrainedTokenizerFast:
    known = [*SPECIAL, *(f"w{number}" for number in range(WORDS))]
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=plain, **dict(zip(names, SPECIAL, strict=True)))


class Texts(Dataset[Any]):
    def __init__(self, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> None:
        draw = random.Random(seed)
        self.tokenizer = tokenizer
        self.texts = [
            " ".join(
                f"w{draw.randrange(WORDS)}"
                for _ in range(min(10 + int(draw.expovariate(1 / 60)), LONGEST))
            )
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        return {**self.tokenizer(self.texts[index]), "labels": index % 2}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=WORDS + len(SPECIAL),
        num_hidden_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=2048,
    )
    Trainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=Texts(tokenizer, TEXTS, args.seed),
        eval_dataset=Texts(tokenizer, TEXTS // 8, args.seed + 1),
        data_collator=DataCollatorWithPadding(tokenizer),
    ).train()


if __name__ == "__main__":
    main()
