"""trl's training scripts, by the commands that they show, with models of the real sizes.

Only `--gradient_accumulation_steps` is less than there (2, not 8): it changes the time of a capture
and not the memory.
"""

from __future__ import annotations

from bench.scripts.accelerate import SETUP
from bench.scripts.case import Case, Check, Reference
from bench.scripts.checks import peak_between, share

_MAKE = ("-m", "bench.scripts.make")
_QWEN2 = 494_032_768
"""Parameters of Qwen2-0.5B, tied embeddings counted once."""
_LORA = 4_325_376
"""Of its LoRA of rank 32 on q_proj and v_proj: 24 layers of 32 · (896 + 896 + 896 + 128); in bf16,
as trl asks of PEFT, and so are its states."""
_SCORE = 896
_EMBEDDING = 151_936 * 896
_LINEAR = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
_BROKE = (
    "`datasets` keeps its caches by `tempfile.NamedTemporaryFile(dir=…)`, which was refused; the "
    "evaluation was never reached"
)
_MENDED = (
    "sandbox: an opener of the script's own; a Trainer evaluates and saves after the last step seen"
)
_MORE = "as above", "as above"


def _qwen2(name: str, *more: str) -> tuple[str, ...]:
    return (
        *_MAKE, "model", "{work}/" + name, "qwen2", "vocab_size=151936", "hidden_size=896",
        "intermediate_size=4864", "num_hidden_layers=24", "num_attention_heads=14",
        "num_key_value_heads=2", "tie_word_embeddings=true", 'dtype="bfloat16"', *more,
    )  # fmt: skip


def _case(
    name: str,
    script: str,
    data: str,
    arguments: str,
    *checks: Check,
    floor: Reference,
    words: str,
    found: tuple[str, str] = _MORE,
) -> Case:
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
        floor=floor,
        script=words,
        broke=found[0],
        mended=found[1],
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
    script="`python -m trl.cli.main sft …`",
    broke="it launches the training in another process, which ran on the host, unseen",
    mended="it is refused, with the command to estimate instead: "
    "`memplan estimate accelerate launch …/sft.py …`",
)
"""`trl sft` trains in a process that it launches; the answer names what to estimate instead."""

CASES = (
    _case(
        "sft", "sft", "chat",
        f"--learning_rate 2.0e-5 {_STEPS} --packing --eos_token <|im_end|> --eval_strategy steps "
        "--eval_steps 100 --output_dir out",
        *_full(_QWEN2),
        floor=Reference(16 * _QWEN2, "494.0 M × 16 bytes"),
        words="`trl/scripts/sft.py`, Qwen2-0.5B, packing, evaluation every 100 steps",
        found=(_BROKE, _MENDED),
    ),
    _case(
        "sft-lora", "sft", "chat",
        f"--learning_rate 2.0e-4 {_STEPS} --packing --eos_token <|im_end|> --use_peft --lora_r 32 "
        "--lora_alpha 16 --dtype bfloat16 --bf16 True --output_dir out",
        share("parameters", 2 * (_QWEN2 + _LORA)),
        share("optimizer_state", 4 * _LORA),
        floor=Reference(2 * _QWEN2 + 8 * _LORA, "494.0 M × 2 + 4.3 M × 8 bytes"),
        words="the same, `--use_peft --lora_r 32 --dtype bfloat16 --bf16 True`",
    ),
    _case(
        "dpo", "dpo", "preference",
        f"--learning_rate 5.0e-7 {_STEPS} --max_steps 1000 --eval_strategy steps --eval_steps 50 "
        "--output_dir out --no_remove_unused_columns",
        share("parameters", 2 * 4 * _QWEN2),
        share("optimizer_state", 8 * _QWEN2),
        floor=Reference(20 * _QWEN2, "494.0 M × (16 + 4) bytes"),
        words="`trl/scripts/dpo.py`, policy and reference model",
    ),
    _case(
        "reward", "reward", "preference",
        f"--learning_rate 1.0e-5 {_STEPS} --eval_strategy steps --eval_steps 50 --max_length 2048 "
        "--output_dir out",
        *_full(_QWEN2 + _SCORE),
        floor=Reference(16 * (_QWEN2 + _SCORE), "494.0 M × 16 bytes"),
        words="`trl/scripts/reward.py`",
    ),
    _case(
        "kto-qlora", "kto", "unpaired",
        "--per_device_train_batch_size 8 --num_train_epochs 1 --learning_rate 5e-7 "
        "--lr_scheduler_type=cosine --gradient_accumulation_steps 1 --eval_steps 500 "
        "--output_dir=out --warmup_steps 0.1 --logging_first_step --use_peft --load_in_4bit "
        "--lora_target_modules=all-linear --lora_r=16 --lora_alpha=16",
        peak_between(1 << 30, 24 << 30),
        floor=Reference(
            _LINEAR // 2 + 2 * _EMBEDDING, "357.8 M × 1/2 (four bits) + 136.1 M × 2 bytes"
        ),
        words="`trl/scripts/kto.py --load_in_4bit --use_peft`",
        found=("as above; bitsandbytes is not installed", "as above; its stand-in"),
    ),
    _case(
        "grpo", "grpo", "prompts",
        "--learning_rate 1.0e-6 --num_train_epochs 1 --per_device_train_batch_size 8 "
        "--num_generations 8 --max_completion_length 64 --gradient_checkpointing --bf16 True "
        "--reward_funcs think_format_reward --output_dir out",
        *_full(_QWEN2),
        floor=Reference(16 * _QWEN2, "494.0 M × 16 bytes"),
        words="`trl/scripts/grpo.py --num_generations 8 --max_completion_length 64`",
        found=(
            "no step in eight minutes: what ends a generation was not known, so it went on past "
            "its 64 tokens; completions read back were empty",
            "where one operand of and / or decides, the result is known; a mask that is read back "
            "holds for every second element",
        ),
    ),
    *(
        _case(
            f"grpo-vllm{'-sleep' * sleep}", "grpo", "prompts",
            "--learning_rate 1.0e-6 --num_train_epochs 1 --per_device_train_batch_size 8 "
            "--num_generations 8 --max_completion_length 64 --gradient_checkpointing --bf16 True "
            "--reward_funcs think_format_reward --output_dir out --use_vllm --vllm_mode colocate "
            f"--vllm_gpu_memory_utilization 0.3 --vllm_enable_sleep_mode {sleep}",
            *_full(_QWEN2),
            floor=(
                Reference(14 * _QWEN2, "494.0 M × (12 + 2) bytes: the engine's while it is awake")
                if sleep
                else Reference(18 * _QWEN2, "494.0 M × (16 + 2) bytes")
            ),
            words=f"the same, `--use_vllm --vllm_mode colocate --vllm_enable_sleep_mode {sleep}`",
            found=("vLLM is not installed, and trl refused", "its stand-in"),
        )
        for sleep in (False, True)
    ),
    Case(
        name="trl-orpo",
        setup=SETUP,
        package="trl==1.16.0",
        argv=("-m", "bench.scripts.programs.odds_ratio"),
        prepare=(_qwen2("Qwen2-0.5B"), (*_MAKE, "data", "{work}/data", "preference")),
        checks=(share("parameters", 2 * _QWEN2), share("optimizer_state", 4 * _QWEN2)),
        floor=Reference(8 * _QWEN2, "494.0 M × 8 bytes: bf16 as the weights file has it"),
        script="`-m bench.scripts.programs.odds_ratio`",
    ),
    _COMMAND,
)  # fmt: skip
