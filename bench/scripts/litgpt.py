"""LitGPT's commands on Pythia 160M and TinyLlama 1.1B, configurations of its own.

For TinyLlama the options are those of `config_hub/finetune/tiny-llama`, whose README has the peaks
that its authors measured on an A10G; the text is ours, and as theirs long enough for 512 tokens.
"""

from __future__ import annotations

from bench.scripts.case import Case, Check, Reference, Setup, pinned
from bench.scripts.checks import share

SETUP = Setup(
    "litgpt",
    wheels=pinned(
        "boto3 botocore certifi charset-normalizer docstring_parser importlib_resources "
        "jmespath jsonargparse lightning lightning-utilities litdata litgpt obstore "
        "pytorch-lightning requests s3transfer tifffile torchmetrics typeshed_client urllib3"
    ),
)

_PARAMETERS = 162_322_944
_LORA = 12 * 8 * 2 * (768 + 768)
"""Rank 8 on queries and values."""
_TINY_LLAMA = 1_100_048_384
_TINY_LORA = 32 * (22 * (3 * 2048 + 2560 + 2 * 2048 + 3 * (2048 + 5632)) + 2048 + 32_000)
"""Rank 32 on queries, keys and values (2048, 256 and 256 wide), the projection, the MLP's three and
the head."""
_DATA = (
    "--data", "JSON", "--data.json_path", "{work}/model/alpaca.json",
    "--data.val_split_fraction", "0.1",
)  # fmt: skip
_README = "LitGPT's `config_hub/finetune/README.md`, A10G"
_STACK = ("--rank", "0", "torchrun", "--nproc-per-node", "2", "-m", "litgpt")


def _case(
    name: str,
    words: str,
    *argv: str,
    checks: tuple[Check, ...],
    floor: Reference,
    published: Reference | None = None,
    model: str = "pythia-160m",
    launcher: tuple[str, ...] = ("-m", "litgpt"),
    prepare: tuple[tuple[str, ...], ...] = (),
    gpu: str = "rtx4090",
    broke: str = "nothing",
    mended: str = "",
) -> Case:
    return Case(
        name=f"litgpt-{name}",
        setup=SETUP,
        package="litgpt==0.5.13",
        argv=(*launcher, *argv, "--out_dir", "{work}/out"),
        prepare=(("-m", "bench.scripts.local", "litgpt", "{work}/model", model), *prepare),
        checks=checks,
        floor=floor,
        published=published,
        script=words,
        gpu=gpu,
        broke=broke,
        mended=mended,
    )


def _state(weights: int, trained: int, size: int) -> tuple[Check, ...]:
    """Weights and the state of AdamW, `size` bytes a value."""
    return (
        share("parameters", size * weights),
        share("optimizer_state", 2 * size * trained),
    )


def _tune(kind: str, global_batch: int, batch: int) -> tuple[str, ...]:
    return (
        f"finetune_{kind}", "{work}/model", *_DATA,
        "--train.global_batch_size", f"{global_batch}", "--train.micro_batch_size", f"{batch}",
        "--precision", "bf16-true",
    )  # fmt: skip


_FULL = Reference(8 * _PARAMETERS, "162.3 M × 8 bytes")
_ADAPTERS = Reference(2 * _PARAMETERS + 8 * _LORA, "162.3 M × 2 + 0.3 M × 8 bytes")
_WIDE = [
    word for name in ("key", "projection", "mlp", "head") for word in (f"--lora_{name}", "true")
]

CASES = (
    _case(
        "finetune-lora", "`litgpt finetune_lora`, Pythia 160M, `--precision bf16-true`",
        *_tune("lora", 8, 2),
        checks=_state(_PARAMETERS + _LORA, _LORA, 2), floor=_ADAPTERS,
    ),
    _case(
        "finetune-full", "`litgpt finetune_full`, the same", *_tune("full", 8, 2),
        checks=_state(_PARAMETERS, _PARAMETERS, 2), floor=_FULL,
    ),
    _case(
        "finetune-lora-fsdp", "`torchrun --nproc-per-node 2 -m litgpt finetune_lora`, FSDP2",
        *_tune("lora", 8, 2), "--devices", "2",
        launcher=_STACK,
        # It loads the frozen weights onto the host, and FSDP2 gathers them from there.
        checks=(share("optimizer_state", 2 * _LORA),),
        floor=Reference(4 * _LORA, "0.3 M × 8 bytes / 2 ranks: the weights are on the host"),
        broke="FSDP2's shards on the host met their gathered whole on the device",
        mended="they are copied there, as FSDP2's kernel does",
    ),
    _case(
        "finetune-full-fsdp", "`torchrun --nproc-per-node 2 -m litgpt finetune_full`, FSDP1",
        *_tune("full", 8, 2), "--devices", "2",
        launcher=_STACK,
        checks=(share("optimizer_state", 2 * _PARAMETERS),),
        floor=Reference(_FULL.nbytes // 2, _FULL.says + " / 2 ranks"),
    ),
    _case(
        "tiny-llama-full", "`litgpt finetune_full`, TinyLlama 1.1B, micro-batches of 4 × 512",
        *_tune("full", 32, 4), "--train.max_seq_length", "512", "--train.epochs", "1",
        model="tiny-llama-1.1b",
        checks=_state(_TINY_LLAMA, _TINY_LLAMA, 2),
        floor=Reference(8 * _TINY_LLAMA, "1,100.0 M × 8 bytes"),
        published=Reference(14_100_000_000, _README),
    ),
    _case(
        "tiny-llama-lora", "`litgpt finetune_lora`, the same, rank 32 everywhere, 8 × 512",
        *_tune("lora", 8, 8), "--train.max_seq_length", "512", "--lora_r", "32", *_WIDE,
        model="tiny-llama-1.1b",
        checks=_state(_TINY_LLAMA + _TINY_LORA, _TINY_LORA, 2),
        floor=Reference(2 * _TINY_LLAMA + 8 * _TINY_LORA, "1,100.0 M × 2 + 26.3 M × 8 bytes"),
        published=Reference(13_500_000_000, _README),
    ),
    _case(
        "pretrain", "`litgpt pretrain pythia-160m`, `torch.compile` included",
        "pretrain", "pythia-160m", "--tokenizer_dir", "{work}/model",
        "--data", "TextFiles", "--data.train_data_path", "{work}/model/text",
        "--train.max_tokens", "10000000", "--train.micro_batch_size", "4",
        "--train.global_batch_size", "16", "--devices", "1", "--logger_name", "csv",
        prepare=(("-m", "bench.scripts.local", "tokens", "{work}/model"),),
        checks=_state(_PARAMETERS, _PARAMETERS, 4),
        floor=Reference(16 * _PARAMETERS, "162.3 M × 16 bytes"),
        gpu="a100-80gb",
    ),
)  # fmt: skip
