"""trl's training scripts, by the commands that they show, with models of the real sizes."""

from __future__ import annotations

from bench.scripts.accelerate import SETUP
from bench.scripts.case import Case
from bench.scripts.checks import share

_PACKAGE = "trl==1.16.0"
_MAKE = ("-m", "bench.scripts.make")
_QWEN2_BYTES = 494_032_768
"""Parameters of Qwen2-0.5B, tied embeddings counted once."""


def _qwen2(*more: str) -> tuple[str, ...]:
    return (
        *_MAKE, "model", "{work}/Qwen2-0.5B", "qwen2", "vocab_size=151936", "hidden_size=896",
        "intermediate_size=4864", "num_hidden_layers=24", "num_attention_heads=14",
        "num_key_value_heads=2", "tie_word_embeddings=true", 'dtype="bfloat16"', *more,
    )  # fmt: skip


def _data(kind: str) -> tuple[str, ...]:
    return (*_MAKE, "data", "{work}/data", kind)


CASES = (
    Case(
        name="trl-sft",
        setup=SETUP,
        package=_PACKAGE,
        argv=(
            "{site}/trl/scripts/sft.py", "--model_name_or_path", "Qwen2-0.5B",
            "--dataset_name", "data", "--learning_rate", "2.0e-5", "--num_train_epochs", "1",
            "--packing", "--per_device_train_batch_size", "2",
            "--gradient_accumulation_steps", "8", "--eos_token", "<|im_end|>",
            "--eval_strategy", "steps", "--eval_steps", "100", "--output_dir", "out",
        ),
        prepare=(_qwen2(), _data("chat")),
        checks=(share("parameters", 2 * _QWEN2_BYTES),),
    ),
)  # fmt: skip
