"""The transformers: GPT-2 and Llama from `transformers`' classes, ViT from torchvision's."""

from __future__ import annotations

from typing import Any

import torch
from torchvision import models
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bench.recompute.case import Case, CrossEntropy, State, Training, Unit

VOCABULARY = 4096


def _language_model(module: Any, batch: int, tokens: int, units: list[Unit]) -> Training:
    """Every unit but the first (embedding) and the last (head) is a block."""
    ids = torch.randint(VOCABULARY, (batch, tokens))
    blocks = frozenset(range(1, len(units) - 1))
    loss = CrossEntropy((batch, tokens), VOCABULARY)
    return Training(module, (ids,), loss, units, blocks)


def gpt2(batch: int, tokens: int, layers: int, width: int, dropout: float = 0.1) -> Training:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=tokens, n_layer=layers, n_embd=width,
        n_head=width // 64, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    module = GPT2LMHeadModel(config)
    body = module.transformer

    def embed(ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        return body.drop(body.wte(ids) + body.wpe(positions))  # type: ignore[no-any-return]

    def head(x: torch.Tensor) -> torch.Tensor:
        return module.lm_head(body.ln_f(x))  # type: ignore[no-any-return]

    return _language_model(module, batch, tokens, [embed, *body.h, head])


def llama(batch: int, tokens: int, layers: int, width: int) -> Training:
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=tokens, num_hidden_layers=layers,
        hidden_size=width, intermediate_size=width * 11 // 4, num_attention_heads=width // 64,
        num_key_value_heads=width // 128, use_cache=False,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    body = module.model

    def embed(ids: torch.Tensor) -> State:
        x = body.embed_tokens(ids)
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        return (x, *body.rotary_emb(x, position_ids=positions))

    def block(layer: Any) -> Unit:
        return lambda x, cos, sin: (layer(x, position_embeddings=(cos, sin)), cos, sin)

    def head(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return module.lm_head(body.norm(x))  # type: ignore[no-any-return]

    return _language_model(module, batch, tokens, [embed, *map(block, body.layers), head])


def vit(
    batch: int, pixels: int, patch: int, layers: int, width: int, dropout: float = 0.1
) -> Training:
    module = models.VisionTransformer(
        pixels, patch, layers, width // 64, width, 4 * width,
        dropout=dropout, attention_dropout=dropout,
    )  # fmt: skip
    encoder = module.encoder

    def embed(images: torch.Tensor) -> torch.Tensor:
        x = module._process_input(images)
        x = torch.cat((module.class_token.expand(len(x), -1, -1), x), 1)
        return encoder.dropout(x + encoder.pos_embedding)  # type: ignore[no-any-return]

    def head(x: torch.Tensor) -> torch.Tensor:
        return module.heads(encoder.ln(x)[:, 0])  # type: ignore[no-any-return]

    units: list[Unit] = [embed, *encoder.layers, head]
    images = torch.randn(batch, 3, pixels, pixels)
    blocks = frozenset(range(1, len(units) - 1))
    return Training(module, (images,), CrossEntropy((batch,), 1000), units, blocks)


_SHARED = f"{VOCABULARY} words, 2 × 256 tokens"
CASES = [
    Case(
        "gpt-2",
        f"6 layers of width 384, dropout 0.1, {_SHARED}",
        lambda: gpt2(2, 256, 6, 384),
    ),
    Case(
        "llama",
        f"8 layers of width 384, 6 heads on 3, {_SHARED}",
        lambda: llama(2, 256, 8, 384),
    ),
    Case(
        "vit",
        "6 layers of width 384, dropout 0.1, 4 × 3 × 96 × 96 in patches of 8",
        lambda: vit(4, 96, 8, 6, 384),
    ),
]
