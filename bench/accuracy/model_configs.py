"""The sizes of public language models, written down so that no download is needed.

Only what decides shapes, saved activations or the cache is set; the rest is transformers'
default for the class. Sizes are those of each model's published `config.json`.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

Sizes = dict[str, Any]

GPT2_DROPOUT: Sizes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
NO_GPT2_DROPOUT: Sizes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _gpt2(layers: int, hidden: int, heads: int) -> Sizes:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        **GPT2_DROPOUT,
    }


def _cerebras(layers: int, hidden: int, heads: int) -> Sizes:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 2048,
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": 4 * hidden,
        "activation_function": "gelu",
        **NO_GPT2_DROPOUT,
    }


def _gpt_neo(layers: int, hidden: int, heads: int) -> Sizes:
    return {
        "model_type": "gpt_neo",
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
        "window_size": 256,
    }


def _gpt_neox(layers: int, hidden: int, heads: int, vocabulary: int = 50304) -> Sizes:
    return {
        "model_type": "gpt_neox",
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": False,
    }


def _opt(layers: int, hidden: int, heads: int, projection: int = 0, pre_norm: bool = True) -> Sizes:
    return {
        "model_type": "opt",
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "word_embed_proj_dim": projection or hidden,
        "do_layer_norm_before": pre_norm,
        "dropout": 0.1,
        "attention_dropout": 0.0,
    }


def _t5(layers: int, hidden: int, heads: int, feed_forward: int) -> Sizes:
    return {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": hidden,
        "d_kv": 64,
        "d_ff": feed_forward,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "dropout_rate": 0.1,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }


def _bloom(layers: int, hidden: int, heads: int) -> Sizes:
    return {
        "model_type": "bloom",
        "vocab_size": 250880,
        "hidden_size": hidden,
        "n_layer": layers,
        "n_head": heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _llama_kind() -> dict[str, Sizes]:
    """Llama and its kin: a row of `llama_sizes.csv` each, whose columns are transformers' names."""
    with Path(__file__).with_name("llama_sizes.csv").open(encoding="utf-8") as file:
        return {row.pop("name"): _given(row) for row in csv.DictReader(file)}


def _given(row: dict[str, str]) -> Sizes:
    kind = row.pop("model_type")
    return {"model_type": kind} | {key: json.loads(text) for key, text in row.items() if text}


MODELS: dict[str, Sizes] = {
    "openai-community/gpt2": _gpt2(12, 768, 12),
    "openai-community/gpt2-medium": _gpt2(24, 1024, 16),
    "openai-community/gpt2-large": _gpt2(36, 1280, 20),
    "openai-community/gpt2-xl": _gpt2(48, 1600, 25),
    "distilbert/distilgpt2": _gpt2(6, 768, 12),
    "cerebras/Cerebras-GPT-111M": _cerebras(10, 768, 12),
    "cerebras/Cerebras-GPT-256M": _cerebras(14, 1088, 17),
    "cerebras/Cerebras-GPT-590M": _cerebras(18, 1536, 12),
    "EleutherAI/gpt-neo-125M": _gpt_neo(12, 768, 12),
    "EleutherAI/gpt-neo-1.3B": _gpt_neo(24, 2048, 16),
    "EleutherAI/pythia-70m": _gpt_neox(6, 512, 8),
    "EleutherAI/pythia-160m": _gpt_neox(12, 768, 12),
    "EleutherAI/pythia-410m": _gpt_neox(24, 1024, 16),
    "EleutherAI/pythia-1b": _gpt_neox(16, 2048, 8),
    "EleutherAI/pythia-1.4b": _gpt_neox(24, 2048, 16),
    "facebook/opt-125m": _opt(12, 768, 12),
    "facebook/opt-350m": _opt(24, 1024, 16, projection=512, pre_norm=False),
    "facebook/opt-1.3b": _opt(24, 2048, 32),
    "T5-small": _t5(6, 512, 8, 2048),
    "T5-base": _t5(12, 768, 12, 3072),
    "T5-large": _t5(24, 1024, 16, 4096),
    "bigscience/bloom-560m": _bloom(24, 1024, 16),
    **_llama_kind(),
    "microsoft/phi-1_5": {
        "model_type": "phi",
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
}


def _plain(name: str) -> str:
    """The name without its owner, in lower case: `google-t5/T5-small` is `t5-small`."""
    return name.rsplit("/", 1)[-1].lower()


_BY_PLAIN_NAME = {_plain(name): sizes for name, sizes in MODELS.items()}


def model_sizes(name: str) -> Sizes:
    """Sizes by name, with or without the owner. Raises SystemExit for an unknown name."""
    try:
        return _BY_PLAIN_NAME[_plain(name)]
    except KeyError:
        raise SystemExit(f"no sizes are written down for {name!r}") from None


def model_config(name: str) -> PretrainedConfig:
    """The configuration of a model by its public name."""
    sizes = dict(model_sizes(name))
    config: PretrainedConfig = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    return config


def is_encoder_decoder(name: str) -> bool:
    """Whether the model is a sequence-to-sequence one (T5)."""
    return bool(model_sizes(name)["model_type"] == "t5")
