"""Train a language model of Transformers on one card or several: an ordinary script.

python language_model.py --model llama-3.2-1b --batch-size 4 --length 2048
torchrun --nproc-per-node 8 language_model.py --model llama-3-8b --parallel fsdp --dtype bf16
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM

DTYPES = {"fp32": torch.float32, "amp": torch.float32, "bf16": torch.bfloat16}

# Sizes as the models' authors publish them: kind; vocabulary, width, width of the MLP, layers,
# heads, heads of keys and values, width of a head; input and output embeddings shared or not.
MODELS: dict[str, tuple[str, tuple[int, ...], bool]] = {
    "llama-3.2-1b": ("llama", (128256, 2048, 8192, 16, 32, 8, 64), True),
    "llama-3.2-3b": ("llama", (128256, 3072, 8192, 28, 24, 8, 128), True),
    "llama-3-8b": ("llama", (128256, 4096, 14336, 32, 32, 8, 128), False),
    "mistral-7b": ("mistral", (32768, 4096, 14336, 32, 32, 8, 128), False),
    "qwen2.5-1.5b": ("qwen2", (151936, 1536, 8960, 28, 12, 2, 128), True),
    "qwen2.5-3b": ("qwen2", (151936, 2048, 11008, 36, 16, 2, 128), True),
    "qwen3-4b": ("qwen3", (151936, 2560, 9728, 36, 32, 8, 128), True),
    "qwen3-8b": ("qwen3", (151936, 4096, 12288, 36, 32, 8, 128), False),
}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


class Packed(Dataset[Tensor]):
    """Rows of equal length (random tokens)."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def make_model(args: argparse.Namespace) -> Any:
    kind, sizes, tied = MODELS[args.model]
    config = AutoConfig.for_model(
        kind,
        **dict(zip(SIZES, sizes, strict=True)),
        tie_word_embeddings=tied,
        max_position_embeddings=max(8192, args.length),
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype])
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.lora:
        from peft import LoraConfig, get_peft_model

        if args.checkpointing:
            model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = LoraConfig(r=args.lora, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    model.train()
    return model


def shard(model: Any) -> None:
    """FSDP2: each layer by itself, the rest together."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def split(model: Any) -> None:
    """Tensor parallel: attention by heads, the MLP by columns and rows, the head by vocabulary."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    columns, rows = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
    for layer in model.model.layers:
        plan: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in columns}
        plan |= {f"self_attn.{name}": RowwiseParallel() for name in rows}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        parallelize_module(layer, mesh, plan | {"mlp.down_proj": RowwiseParallel()})
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))


def place(model: Any, args: argparse.Namespace) -> Any:
    """The model on this rank's card, split among the ranks as asked."""
    if args.parallel == "none":
        return model.to("cuda")
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if args.parallel == "fsdp":
        shard(model.to(device))
    elif args.parallel == "tp":
        split(model.to(device))
    else:
        return nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device.index])
    return model


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Split parameters apart from whole ones: PyTorch cannot update both in one operation."""
    split = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    groups = [{"params": group} for group in (split, whole) if group]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1e-4)
    return torch.optim.AdamW(groups, lr=1e-5, fused=True if name == "adamw-fused" else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp", "tp"], default="none")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="amp: to bf16")
    parser.add_argument("--optimizer", choices=["sgd", "adamw", "adamw-fused"], default="adamw")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="each layer by itself")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    model = make_model(args)
    if args.compile:  # each layer by itself: compiled once for all of them
        for layer in model.get_decoder().layers:
            layer.compile()
    model = place(model, args)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(args.optimizer, parameters)
    micro_batches = args.gradient_accumulation_steps
    rows = Packed(
        args.steps * micro_batches * args.batch_size, args.length, MODELS[args.model][1][0]
    )
    loader = DataLoader(rows, batch_size=args.batch_size, pin_memory=True)
    for number, host_tokens in enumerate(loader, start=1):
        tokens = host_tokens.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.dtype == "amp"):
            loss = model(input_ids=tokens, labels=tokens).loss / micro_batches
        loss.backward()
        if number % micro_batches:
            continue
        if args.clip:
            nn.utils.clip_grad_norm_(parameters, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number // micro_batches}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
