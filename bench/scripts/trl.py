"""trl's training scripts, by the commands that they show, with models of the real sizes.

Only `--gradient_accumulation_steps` is less than there (2, not 8): it changes the time of a capture
and not the memory.
"""

from __future__ import annotations

from bench.scripts.accelerate import SETUP
from bench.scripts.case import Case, Check
from bench.scripts.checks import peak_between, share

_MAKE = ("-m", "bench.scripts.make")
_QWEN2 = 494_032_768
"""Parameters of Qwen2-0.5B, tied embeddings counted once."""
_LORA = 4_325_376
"""Of its LoRA of rank 32 on q_proj and v_proj: 24 layers of 32 · (896 + 896 + 896 + 128); in bf16,
as trl asks of PEFT, and so are its states."""
_SCORE = 896


def _qwen2(name: str, *more: str) -> tuple[str, ...]:
    return (
        *_MAKE, "model", "{work}/" + name, "qwen2", "vocab_size=151936", "hidden_size=896",
        "intermediate_size=4864", "num_hidden_layers=24", "num_attention_heads=14",
        "num_key_value_heads=2", "tie_word_embeddings=true", 'dtype="bfloat16"', *more,
    )  # fmt: skip


def _case(name: str, script: str, data: str, arguments: str, *checks: Check) -> Case:
    return Case(
        name=f"trl-{name}",
        setup=SETUP,
        package="trl==1.16.0",
        argv=(
            f"{{site}}/trl/scripts/{script}.py",
            *("--model_name_or_path Qwen2-0.5B --dataset_name data " + arguments).split(),
        ),
        prepare=(_qwen2("Qwen2-0.5B"), (*_MAKE, "data", "{work}/data", data)),
        checks=checks,
        timeout_seconds=900.0,
    )


def _full(parameters: int) -> tuple[Check, ...]:
    """Weights and AdamW's state in fp32."""
    return share("parameters", 4 * parameters), share("optimizer_state", 8 * parameters)


_STEPS = "--num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 2"

_COMMAND = Case(
    name="trl-command",
    setup=SETUP,
    package="trl==1.16.0",
    argv=("-m", "trl.cli.main", "sft", "--model_name_or_path", "model", "--output_dir", "out"),
    exit_codes=(4,),
    message="memplan estimate accelerate launch",
)
"""`trl sft` trains in a process that it launches; the answer names what to estimate instead."""

CASES = (
    _case(
        "sft", "sft", "chat",
        f"--learning_rate 2.0e-5 {_STEPS} --packing --eos_token <|im_end|> --eval_strategy steps "
        "--eval_steps 100 --output_dir out",
        *_full(_QWEN2),
    ),
    _case(
        "sft-lora", "sft", "chat",
        f"--learning_rate 2.0e-4 {_STEPS} --packing --eos_token <|im_end|> --use_peft --lora_r 32 "
        "--lora_alpha 16 --dtype bfloat16 --bf16 True --output_dir out",
        share("parameters", 2 * (_QWEN2 + _LORA)),
        share("optimizer_state", 4 * _LORA),
    ),
    _case(
        "dpo", "dpo", "preference",
        f"--learning_rate 5.0e-7 {_STEPS} --max_steps 1000 --eval_strategy steps --eval_steps 50 "
        "--output_dir out --no_remove_unused_columns",
        share("parameters", 2 * 4 * _QWEN2),
        share("optimizer_state", 8 * _QWEN2),
    ),
    _case(
        "reward", "reward", "preference",
        f"--learning_rate 1.0e-5 {_STEPS} --eval_strategy steps --eval_steps 50 --max_length 2048 "
        "--output_dir out",
        *_full(_QWEN2 + _SCORE),
    ),
    _case(
        "kto-qlora", "kto", "unpaired",
        "--per_device_train_batch_size 8 --num_train_epochs 1 --learning_rate 5e-7 "
        "--lr_scheduler_type=cosine --gradient_accumulation_steps 1 --eval_steps 500 "
        "--output_dir=out --warmup_steps 0.1 --logging_first_step --use_peft --load_in_4bit "
        "--lora_target_modules=all-linear --lora_r=16 --lora_alpha=16",
        peak_between(1 << 30, 24 << 30),
    ),
    _COMMAND,
)  # fmt: skip
