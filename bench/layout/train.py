"""The jobs of the layout table: a language model or ResNet-50, in steps of several micro-batches.

An ordinary script that knows nothing of memplan. With `--pipeline` it is one rank of an
interleaved 1F1B schedule (`torch.distributed.pipelining`) and needs a launcher.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2MoeConfig

CHUNKS = 2
"""Stages of a rank in the pipeline."""


def config_of(args: argparse.Namespace, layers: int) -> Any:
    """The sizes of GPT-2 small, Llama-2-7B and Qwen1.5-MoE-A2.7B, with this many layers."""
    common = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if args.model == "gpt2":
        return GPT2Config(n_layer=layers, n_positions=args.tokens, **common)
    if args.model == "llama":
        return LlamaConfig(
            num_hidden_layers=layers, vocab_size=32000, hidden_size=4096,
            intermediate_size=11008, num_attention_heads=32, **common,
        )  # fmt: skip
    return Qwen2MoeConfig(
        num_hidden_layers=layers, vocab_size=151936, hidden_size=2048, intermediate_size=5632,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_attention_heads=16,
        num_key_value_heads=16, num_experts=args.experts, num_experts_per_tok=4, **common,
    )  # fmt: skip


def language_model(args: argparse.Namespace, layers: int) -> Any:
    more = {"experts_implementation": "eager"} if args.model == "moe" else {}
    model = AutoModelForCausalLM.from_config(config_of(args, layers), dtype=torch.bfloat16, **more)
    if args.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


class Stage(nn.Module):
    """A part of a decoder: some of its layers, the embedding before or the head behind them."""

    def __init__(self, args: argparse.Namespace, index: int, stages: int) -> None:
        super().__init__()
        model = language_model(args, args.layers // stages)
        body = model.transformer if args.model == "gpt2" else model.model
        self.layers = body.h if args.model == "gpt2" else body.layers
        self.rotary = None if args.model == "gpt2" else body.rotary_emb
        first, last = index == 0, index == stages - 1
        self.embedding = (
            (body.wte if args.model == "gpt2" else body.embed_tokens) if first else None
        )
        self.norm = (body.ln_f if args.model == "gpt2" else body.norm) if last else None
        self.head = model.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        more = {}
        if self.rotary is not None:
            positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            more["position_embeddings"] = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, **more)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def pipeline(args: argparse.Namespace) -> tuple[nn.Module, Callable[[], None]]:
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    stages: list[Any] = []
    parts = nn.ModuleList()
    ids = torch.empty(args.batch, args.tokens, dtype=torch.int64, device="meta")
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    hidden = torch.empty(*ids.shape, config_of(args, 1).hidden_size, **like)
    for index in range(rank, CHUNKS * size, size):
        part = Stage(args, index, CHUNKS * size).to(device)
        parts.append(part)
        takes, gives = (ids if index == 0 else hidden), hidden
        if part.head is not None:
            gives = torch.empty(*ids.shape, part.head.out_features, **like)
        stage = PipelineStage(
            part, index, CHUNKS * size, device, input_args=takes, output_args=gives
        )
        stages.append(stage)
    schedule: Any = ScheduleInterleaved1F1B(stages, args.micro_batches, loss_fn=next_token_loss)

    def passes() -> None:
        tokens = torch.randint(1000, (args.micro_batches * args.batch, args.tokens)).to(device)
        first, last = rank == 0, rank == size - 1
        schedule.step(*([tokens] if first else []), **({"target": tokens} if last else {}))

    return parts, passes


def accumulated(args: argparse.Namespace) -> tuple[nn.Module, Callable[[], None]]:
    model = language_model(args, args.layers).cuda()

    def passes() -> None:
        for _ in range(args.micro_batches):
            tokens = torch.randint(1000, (args.batch, args.tokens)).cuda()
            (model(input_ids=tokens, labels=tokens).loss / args.micro_batches).backward()

    return model, passes


def resnet(args: argparse.Namespace) -> tuple[nn.Module, Callable[[], None]]:
    from torchvision.models import resnet50

    model = resnet50().cuda()
    blocks = [block for stage in (1, 2, 3, 4) for block in getattr(model, f"layer{stage}")]

    def run(x: Any) -> Any:
        if not args.recompute:
            return model(x)
        x = model.maxpool(model.relu(model.bn1(model.conv1(x))))
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.fc(model.avgpool(x).flatten(1))

    def passes() -> None:
        for _ in range(args.micro_batches):
            images = torch.randn(args.batch, 3, 224, 224).cuda()
            labels = torch.randint(1000, (args.batch,)).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = cross_entropy(run(images), labels)
            loss.backward()

    return model, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=("gpt2", "llama", "moe", "resnet50"), required=True)
    add("--layers", type=int, default=12)
    add("--experts", type=int, default=60)
    add("--batch", type=int, default=4)
    add("--tokens", type=int, default=1024)
    add("--micro-batches", type=int, default=1)
    add("--recompute", action="store_true", help="checkpoint every block")
    add("--pipeline", action="store_true", help="be one rank of an interleaved pipeline")
    add("--steps", type=int, default=4)
    args = parser.parse_args()
    if args.pipeline:
        model, passes = pipeline(args)
    else:
        model, passes = resnet(args) if args.model == "resnet50" else accumulated(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(args.steps):
        passes()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
