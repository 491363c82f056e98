"""torchtune's recipes with its own configurations of Llama 3.2 1B.

Only what a user must say is overridden: where the checkpoint, the tokenizer and the data are. The
full recipe's optimizer is PyTorch's, as the one in its configuration needs another package.
"""

from __future__ import annotations

from bench.scripts.case import Case, Check, Reference, Setup, pinned
from bench.scripts.checks import share, share_at_least

SETUP = Setup(
    "torchtune",
    wheels=(
        *pinned(
            "antlr4-python3-runtime blobfile certifi charset-normalizer datasets dill kagglehub "
            "kagglesdk lxml multiprocess"
        ),
        "omegaconf==2.4.0",
        *pinned(
            "pyarrow pycryptodomex requests sentencepiece tiktoken torchao torchdata torchtune "
            "urllib3 xxhash"
        ),
    ),
)

_EMBEDDING = 128_256 * 2048
_LINEAR = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
_PARAMETERS = _EMBEDDING + _LINEAR + 33 * 2048
"""Of Llama 3.2 1B, the tied embedding counted once."""
_LORA = 16 * 64 * (2 * (2048 + 2048) + (2048 + 512) + 3 * (2048 + 8192))
"""Rank 64 on the query, value and output projections and the three of the MLP."""
_ROPE = 131_072 * 32 * 2 * 4
"""Cosines and sines for every position, in fp32."""
_NF4 = _LINEAR // 2 + _LINEAR // 64 + 2 * _LINEAR // (64 * 256)
"""Four bits each, an 8-bit scale for every 64, a bf16 one for every 256 of those."""


def _case(
    name: str,
    recipe: str,
    config: str,
    *arguments: str,
    checks: tuple[Check, ...],
    floor: Reference,
    launcher: tuple[str, ...] = (),
    found: tuple[str, str] = ("nothing", ""),
) -> Case:
    more = (*launcher, *arguments)
    return Case(
        name=f"torchtune-{name}",
        setup=SETUP,
        package="torchtune==0.6.1",
        argv=(
            *launcher,
            f"{{site}}/recipes/{recipe}.py",
            "--config",
            f"{{site}}/recipes/configs/llama3_2/{config}.yaml",
            "checkpointer.checkpoint_dir={work}/model",
            "tokenizer.path={work}/model/tokenizer.model",
            "dataset.source=json",
            "dataset.data_files={work}/model/alpaca.json",
            "dataset.split=train",
            "output_dir={work}/out",
            *arguments,
        ),
        prepare=(("-m", "bench.scripts.local", "llama", "{work}/model"),),
        checks=checks,
        floor=floor,
        script=" ".join((f"`{recipe}.py`, `{config}.yaml`", *(f"`{word}`" for word in more))),
        broke=found[0],
        mended=found[1],
        gpu="h100",
    )


def _adapter(base_bytes: int) -> tuple[Check, ...]:
    """Everything in bf16: base weights, LoRA, its gradients and AdamW's two moments."""
    return (
        share("parameters", base_bytes + 2 * _LORA + _ROPE, tolerance=0.04),
        share("optimizer_state", 4 * _LORA),
        share("gradients", 2 * _LORA),
    )


_TWO_RANKS = ("--steps", "2", "--rank", "0", "torchrun", "--nproc-per-node", "2")

CASES = (
    _case(
        "full",
        "full_finetune_single_device",
        "1B_full_single_device",
        "optimizer._component_=torch.optim.AdamW",
        checks=(
            share("parameters", 2 * _PARAMETERS),
            share("optimizer_state", 4 * _PARAMETERS),
            share_at_least("gradients", 2 * _EMBEDDING),
        ),
        floor=Reference(
            6 * _PARAMETERS + 2 * _EMBEDDING,
            "1,235.8 M × 6 bytes + the gradient of the tied embedding (the optimizer runs inside "
            "the backward pass)",
        ),
        found=(
            "bf16 was refused (no NCCL); `torch.tensor` of a list of device scalars; known values "
            'moved by `with torch.device("cuda")`',
            "NCCL answers; `capturing/tensors/constructors.py`; operators of ours leave the "
            "script's default device alone",
        ),
    ),
    _case(
        "lora",
        "lora_finetune_single_device",
        "1B_lora_single_device",
        checks=_adapter(2 * _PARAMETERS),
        floor=Reference(2 * _PARAMETERS + 8 * _LORA, "1,235.8 M × 2 + 42.5 M × 8 bytes"),
        found=(
            "100 bf16 matrix products on the host while adapters are merged for the checkpoint",
            "weights read back stay fake; what the host does after the epoch has 20 s",
        ),
    ),
    _case(
        "qlora",
        "lora_finetune_single_device",
        "1B_qlora_single_device",
        checks=_adapter(2 * (_PARAMETERS - _LINEAR) + _NF4),
        floor=Reference(
            2 * (_PARAMETERS - _LINEAR) + _NF4 + 8 * _LORA,
            "973.1 M in NF4, 262.7 M × 2 and 42.5 M × 8 bytes",
        ),
        found=(
            "NF4 weights (torchao) could not be swapped into a layer; operators on them ran past "
            "the capture; they were no parameters",
            "references of the fake mode are dropped before a swap; wrapper tensors take "
            "themselves apart under the capture; what they hold has their role",
        ),
    ),
    _case(
        "full-distributed",
        "full_finetune_distributed",
        "1B_full",
        "gradient_accumulation_steps=1",
        launcher=_TWO_RANKS,
        checks=(
            share("parameters", _PARAMETERS + _ROPE),
            share("optimizer_state", 2 * _PARAMETERS),
        ),
        floor=Reference(4 * _PARAMETERS, "1,235.8 M × 8 bytes / 2 ranks"),
    ),
    _case(
        "lora-distributed",
        "lora_finetune_distributed",
        "1B_lora",
        "gradient_accumulation_steps=1",
        launcher=_TWO_RANKS,
        checks=(
            share("parameters", _PARAMETERS + _LORA + _ROPE),
            share("optimizer_state", 2 * _LORA),
        ),
        floor=Reference(_PARAMETERS + 4 * _LORA, "(1,235.8 M × 2 + 42.5 M × 8 bytes) / 2 ranks"),
    ),
)
