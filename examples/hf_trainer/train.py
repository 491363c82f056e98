"""Fine-tune a BERT classifier with the Hugging Face Trainer: evaluation, metrics, checkpoints."""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing
from tokenizers.trainers import WordPieceTrainer
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

GOOD = "a warm funny film with wonderful acting and a story that stays with you"
BAD = "a dull slow film with wooden acting and a story that nobody will remember"
OTHER = "the director camera music scene ending cast plot screen audience light sound"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_reviews(count: int, longest: int, seed: int) -> list[tuple[str, int]]:
    """Made-up reviews of different lengths, each with its label."""
    chance = random.Random(seed)
    reviews = []
    for _ in range(count):
        label = chance.randrange(2)
        words = f"{GOOD if label else BAD} {OTHER}".split()
        words = chance.choices(words, k=chance.randint(8, longest))
        reviews.append((" ".join(words), label))
    return reviews


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator(texts, WordPieceTrainer(special_tokens=SPECIAL))
    end, start = (SPECIAL.index(token) for token in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = BertProcessing(("[SEP]", end), ("[CLS]", start))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


class Reviews(Dataset[dict[str, object]]):
    """Tokenized reviews; the collator pads each batch to its longest."""

    def __init__(
        self, reviews: list[tuple[str, int]], tokenizer: PreTrainedTokenizerFast, length: int
    ) -> None:
        texts = [text for text, _ in reviews]
        self.rows = tokenizer(texts, truncation=True, max_length=length)
        self.labels = [label for _, label in reviews]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {name: column[index] for name, column in self.rows.items()} | {
            "labels": self.labels[index]
        }


def accuracy(prediction: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(axis=-1) == labels).mean())}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="bf16")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--reviews", type=int, default=1280)
    parser.add_argument("--length", type=int, default=256, help="most tokens per review")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=30522)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--output", default="out/hf_trainer")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    train = write_reviews(args.reviews, args.length, seed=1)
    held_out = write_reviews(max(1, args.reviews // 10), args.length, seed=2)
    tokenizer = train_tokenizer([text for text, _ in train])

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=args.vocab,
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            intermediate_size=4 * args.hidden,
            max_position_embeddings=512,
            num_labels=2,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=2 * args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            warmup_steps=5,
            fp16=args.precision == "fp16",
            bf16=args.precision == "bf16",
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=args.evaluate_every,
            save_steps=args.evaluate_every,
            save_total_limit=1,
            load_best_model_at_end=True,
            logging_steps=5,
            dataloader_num_workers=args.workers,
            use_cpu=args.cpu,
            report_to="none",
        ),
        train_dataset=Reviews(train, tokenizer, args.length),
        eval_dataset=Reviews(held_out, tokenizer, args.length),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
