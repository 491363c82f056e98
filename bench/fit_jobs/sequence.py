"""Fine-tune T5, Whisper or GPT-Neo in mixed precision or in fp32: an ordinary script.

python sequence.py --model whisper-small --batch-size 16 --precision fp16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

Batch = dict[str, Tensor]


def t5(args: argparse.Namespace) -> tuple[Any, Callable[[], Batch]]:
    config = AutoConfig.for_model(
        "t5", d_model=768, d_ff=3072, num_layers=12, num_heads=12, d_kv=64,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    rows = (args.batch_size, args.length)

    def batch() -> Batch:
        tokens = torch.randint(32000, rows)
        return {"input_ids": tokens, "labels": tokens[:, : args.length // 4].clone()}

    return AutoModelForSeq2SeqLM.from_config(config), batch


def whisper(args: argparse.Namespace) -> tuple[Any, Callable[[], Batch]]:
    """Thirty seconds of sound a row, as its feature extractor makes it."""
    config = AutoConfig.for_model(
        "whisper", d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=51865,
        use_cache=False,
    )  # fmt: skip
    labels = (args.batch_size, args.length)

    def batch() -> Batch:
        sound = torch.randn(args.batch_size, 80, 3000)
        return {"input_features": sound, "labels": torch.randint(50000, labels)}

    return AutoModelForSpeechSeq2Seq.from_config(config), batch


def gpt_neo(args: argparse.Namespace) -> tuple[Any, Callable[[], Batch]]:
    config = AutoConfig.for_model(
        "gpt_neo", hidden_size=768, num_layers=12, num_heads=12, use_cache=False,
        attention_types=[[["global", "local"], 6]],
    )  # fmt: skip

    def batch() -> Batch:
        tokens = torch.randint(50257, (args.batch_size, args.length))
        return {"input_ids": tokens, "labels": tokens}

    return AutoModelForCausalLM.from_config(config), batch


MODELS = {"t5-base": t5, "whisper-small": whisper, "gpt-neo-125m": gpt_neo}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    model, batch = MODELS[args.model](args)
    model.to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")
    half = torch.float16 if args.precision == "fp16" else torch.bfloat16
    for step in range(args.steps):
        inputs = {name: value.to("cuda") for name, value in batch().items()}
        with torch.autocast("cuda", half, enabled=args.precision != "fp32"):
            loss = model(**inputs).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
