"""Llama-3.2-3B fine-tuned the way PEFT's method comparison measured it, in full or with LoRA.

An ordinary script: it knows nothing of memplan. The model in bf16 with SDPA, no checkpointing, no
autocast, batches of 4 sorted from long to short, AdamW (foreach), gradients clipped at 1.0,
`empty_cache` every 10 steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from model_configs import model_config  # type: ignore[import-not-found]
from torch import nn
from transformers import AutoModelForCausalLM

EMPTY_CACHE_EVERY = 10
PAD = 0


def build(options: argparse.Namespace) -> nn.Module:
    config = model_config("meta-llama/Llama-3.2-3B-Instruct")
    if options.layers:
        config.num_hidden_layers = options.layers
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(options.device)
    if options.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    adapted: nn.Module = get_peft_model(model, lora, autocast_adapter_dtype=True)
    return adapted


def batches(options: argparse.Namespace) -> Iterator[list[torch.Tensor]]:
    """The head of a bucket sorted from long to short; its longest text has `longest` tokens."""
    length = options.longest
    for _ in range(options.steps):
        texts = []
        for _ in range(4):
            texts.append(torch.full((length,), 7))
            length = max(1, length - options.fall)
        yield texts


def train(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    model = build(options)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    for step, texts in enumerate(batches(options), start=1):
        lengths = [len(text) for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
        mask = (torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]).long()
        batch = {"input_ids": padded.to(device), "attention_mask": mask.to(device)}
        labels = batch["input_ids"].clone()
        for row, tokens in enumerate(lengths):
            labels[row, tokens + 1 :] = -100
        batch["labels"] = labels
        num_items_in_batch = batch["attention_mask"].sum().item()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EMPTY_CACHE_EVERY == 0:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=("full", "lora"), required=True)
    parser.add_argument("--longest", type=int, required=True, help="tokens of the longest text")
    parser.add_argument("--fall", type=int, default=10, help="tokens lost from text to text")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers; 0 keeps all")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
