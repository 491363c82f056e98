"""LitGPT's commands on Pythia 160M, a configuration of its own."""

from __future__ import annotations

from bench.scripts.case import Case, Check, Setup
from bench.scripts.checks import share

SETUP = Setup(
    "litgpt",
    wheels=(
        "boto3==1.44.5",
        "botocore==1.44.5",
        "docstring_parser==0.18.0",
        "importlib_resources==7.1.0",
        "jmespath==1.1.0",
        "jsonargparse==4.41.0",
        "lightning==2.6.6",
        "lightning-utilities==0.15.3",
        "litdata==0.2.76",
        "litgpt==0.5.13",
        "obstore==0.12.1",
        "pytorch-lightning==2.6.6",
        "requests==2.34.2",
        "s3transfer==0.19.3",
        "tifffile==2026.3.3",
        "torchmetrics==1.9.0",
        "typeshed_client==2.14.0",
        "urllib3==2.8.0",
    ),
)

_PARAMETERS = 162_322_944
_LORA = 12 * 8 * 2 * (768 + 768)
"""Rank 8 on queries and values."""
_MODEL = ("-m", "bench.scripts.local", "litgpt", "{work}/model", "pythia-160m")
_DATA = (
    "--data", "JSON", "--data.json_path", "{work}/model/alpaca.json",
    "--data.val_split_fraction", "0.1",
)  # fmt: skip


def _case(
    name: str, *argv: str, checks: tuple[Check, ...], prepare: tuple[tuple[str, ...], ...] = ()
) -> Case:
    return Case(
        name=f"litgpt-{name}",
        setup=SETUP,
        package="litgpt==0.5.13",
        argv=("-m", "litgpt", *argv, "--out_dir", "{work}/out"),
        prepare=(_MODEL, *prepare),
        checks=checks,
        timeout_seconds=900.0,
    )


def _state(weights: int, trained: int, size: int) -> tuple[Check, ...]:
    """Weights and the state of AdamW, `size` bytes a value."""
    return (
        share("parameters", size * weights),
        share("optimizer_state", 2 * size * trained),
    )


CASES = (
    _case(
        "finetune-lora", "finetune_lora", "{work}/model", *_DATA,
        "--train.global_batch_size", "8", "--train.micro_batch_size", "2",
        "--precision", "bf16-true",
        checks=_state(_PARAMETERS + _LORA, _LORA, 2),
    ),
    _case(
        "finetune-full", "finetune_full", "{work}/model", *_DATA,
        "--train.global_batch_size", "8", "--train.micro_batch_size", "2",
        "--precision", "bf16-true",
        checks=_state(_PARAMETERS, _PARAMETERS, 2),
    ),
    _case(
        "pretrain", "pretrain", "pythia-160m", "--tokenizer_dir", "{work}/model",
        "--data", "TextFiles", "--data.train_data_path", "{work}/model/text",
        "--train.max_tokens", "10000000", "--train.micro_batch_size", "4",
        "--train.global_batch_size", "16", "--devices", "1", "--logger_name", "csv",
        prepare=(("-m", "bench.scripts.local", "tokens", "{work}/model"),),
        checks=_state(_PARAMETERS, _PARAMETERS, 4),
    ),
)  # fmt: skip
