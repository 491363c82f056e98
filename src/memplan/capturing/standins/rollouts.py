"""Finds where a job generates text and where it passes weights to an engine, as stages."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.standins.engine import some_tokens
from memplan.capturing.standins.finder import StandInFinder, installed
from memplan.capturing.state import CaptureState

_FROM_VLLM = {
    "LLM": "vllm",
    "RequestOutput": "vllm",
    "SamplingParams": "vllm",
    "StructuredOutputsParams": "vllm.sampling_params",
}
"""Names that trl imports where vLLM is installed."""


def adapt_generate(patches: Patches, state: CaptureState, module: types.ModuleType) -> None:
    """`generate` of transformers' models. What it gives to trl, which trains on it up to the token
    that ends it, is known from then on: none does, for nothing ended the generation."""
    mixin = getattr(module, "GenerationMixin", None)
    if mixin is None:
        return
    generate = mixin.generate

    @functools.wraps(generate)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        with state.stage("generation"):
            result = generate(model, *args, **kwargs)
        if _called_by_trl(sys._getframe(1)):
            prompt = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
            _learn_tokens(state, model.config, prompt, getattr(result, "sequences", result))
        return result

    patches.set(mixin, "generate", call)


def _called_by_trl(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("trl."):
            return True
        frame = frame.f_back
    return False


def _learn_tokens(state: CaptureState, config: Any, prompt: Any, tokens: Any) -> None:
    known = isinstance(tokens, FakeTensor) and not state.values.knows(tokens)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if not known or vocabulary is None or tokens.dim() != 2 or tokens.is_floating_point():
        return
    rows, length = tokens.shape
    value = torch.tensor(some_tokens(vocabulary, length), dtype=tokens.dtype).repeat(rows, 1)
    asked = state.values.of(prompt) if isinstance(prompt, FakeTensor) else None
    if asked is not None and not config.is_encoder_decoder and rows % len(asked) == 0:
        value[:, : asked.shape[1]] = asked.repeat_interleave(rows // len(asked), 0)
    state.values.learn(tokens, value)
    state.assume(
        "generation", "generated texts have their greatest length: no token ends one early"
    )


def adapt_trl(
    patches: Patches, state: CaptureState, finder: StandInFinder, module: types.ModuleType
) -> None:
    """trl looks for vLLM when it is imported; a job that uses it has it."""
    rollouts = module.VLLMGeneration
    make = rollouts.__init__

    @functools.wraps(make)
    def init(*args: Any, **kwargs: Any) -> None:
        if not installed("vllm"):
            finder.want("vllm")
            for name, package in _FROM_VLLM.items():
                patches.set(module, name, getattr(importlib.import_module(package), name), new=True)
        make(*args, **kwargs)

    patches.set(rollouts, "__init__", init)
    sync = state.stage("weight sync")(rollouts.sync_weights)
    patches.set(rollouts, "sync_weights", sync)
