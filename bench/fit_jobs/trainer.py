"""Fine-tune with Transformers' Trainer, with LoRA or whole: an ordinary script.

python trainer.py --model qwen3-8b --lora 16 --output_dir out --per_device_train_batch_size 4 --bf16
Options of `TrainingArguments` are options of this script.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Options:
    """What is trained, on rows of which length."""

    model: str = field(default="bert", metadata={"choices": ["bert", "qwen3-8b", "qwen2.5-1.5b"]})
    length: int = 512
    lora: int = field(default=0, metadata={"help": "rank of the adapters; 0: none"})
    rows: int = 2000


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, count: int, length: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model(options: Options) -> Any:
    if options.model == "bert":
        return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert"))
    kind, width, mlp, layers, heads, groups = {
        "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8),
        "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2),
    }[options.model]
    config = AutoConfig.for_model(
        kind,
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=kind == "qwen2",
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(
            model, LoraConfig(r=options.lora, target_modules=targets, task_type="CAUSAL_LM")
        )
    return model


def main() -> None:
    parser = HfArgumentParser((Options, TrainingArguments))
    options, arguments = parser.parse_args_into_dataclasses()
    model = make_model(options)
    rows = Rows(options.rows, options.length, model.config.vocab_size)
    Trainer(model=model, args=arguments, train_dataset=rows).train()


if __name__ == "__main__":
    main()
