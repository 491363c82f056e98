"""Puts Liger's modules into transformers' models of the Llama kind.

What is replaced follows Liger-Kernel 0.8.5, `transformers/monkey_patch.py`; the forward of a model
with labels, `transformers/model/llama.py` and `loss_utils.py`: no logits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from .. import functions
from .layers import LigerCrossEntropyLoss, LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb

_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _loss(
    hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor, items: Any
) -> torch.Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1).to(hidden.device)
    flat = hidden.view(-1, hidden.shape[-1])
    reduction = "mean" if items is None else "sum"
    loss: torch.Tensor = functions.fused_linear_cross_entropy(
        flat, head.weight, shifted, head.bias, None, reduction
    )
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)


def lce_forward(
    self: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    inputs_embeds: Any = None,
    labels: Any = None,
    use_cache: Any = None,
    logits_to_keep: Any = 0,
    **kwargs: Any,
) -> Any:
    """The forward of a causal language model; logits only where there are no labels."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    items = kwargs.pop("num_items_in_batch", None)
    kwargs.pop("skip_logits", None)
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    hidden = outputs[0]
    if isinstance(logits_to_keep, int) and logits_to_keep:
        hidden = hidden[:, -logits_to_keep:, :]
    logits = loss = None
    if labels is not None and self.training:
        loss = _loss(hidden, self.lm_head, labels, items)
    else:
        logits = self.lm_head(hidden)
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size
            )
    return CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


def _patch_norm(module: Any) -> None:
    module.offset, module.casting_mode = 0.0, "llama"
    module.forward = MethodType(LigerRMSNorm.forward, module)


def _apply_to(kind: str) -> Callable[..., None]:
    def apply(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
        **_more: Any,
    ) -> None:
        name = _CLASSES[kind]
        modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        if rope:
            modeling.apply_rotary_pos_emb = liger_rotary_pos_emb  # type: ignore[attr-defined]
        if rms_norm:
            setattr(modeling, f"{name}RMSNorm", LigerRMSNorm)
        if swiglu:
            setattr(modeling, f"{name}MLP", LigerSwiGLUMLP)
        if cross_entropy:
            loss = LigerCrossEntropyLoss()
            torch.nn.functional.cross_entropy = lambda x, y, *_rest, **_named: loss(x, y)
        if fused_linear_cross_entropy:
            if model is not None:
                model.forward = MethodType(lce_forward, model)
            else:
                getattr(modeling, f"{name}ForCausalLM").forward = lce_forward
        if model is not None:
            _patch_instance(model, rms_norm, swiglu)

    apply.__name__ = f"apply_liger_kernel_to_{kind}"
    return apply


def _patch_instance(model: Any, rms_norm: bool, swiglu: bool) -> None:
    base = getattr(model, model.base_model_prefix, model)
    if rms_norm:
        _patch_norm(base.norm)
    for layer in base.layers:
        if swiglu:
            layer.mlp.forward = MethodType(LigerSwiGLUMLP.forward, layer.mlp)
        if rms_norm:
            _patch_norm(layer.input_layernorm)
            _patch_norm(layer.post_attention_layernorm)


apply_liger_kernel_to_llama = _apply_to("llama")
apply_liger_kernel_to_mistral = _apply_to("mistral")
apply_liger_kernel_to_qwen2 = _apply_to("qwen2")
apply_liger_kernel_to_qwen3 = _apply_to("qwen3")


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    if model_type not in _CLASSES:
        from memplan.types.errors import CaptureError

        raise CaptureError(
            f"liger_kernel for models of type {model_type!r} cannot be captured: memplan's "
            f"stand-in knows {', '.join(_CLASSES)}",
            "pip install --no-deps liger-kernel here: its own Python runs, without its kernels",
        )
    _apply_to(model_type)(**kwargs)


def _apply_liger_kernel_to_instance(model: Any, **kwargs: Any) -> None:
    _apply_liger_kernel(model.config.model_type, model=model, **kwargs)


_CHOICES = (
    "rope",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "rms_norm",
    "swiglu",
)


class AutoLigerKernelForCausalLM:
    """`AutoModelForCausalLM` with Liger's modules; which of them, keywords choose."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        rest = cls._apply(AutoConfig.from_pretrained(name).model_type, kwargs)
        return AutoModelForCausalLM.from_pretrained(name, *args, **rest)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config, **cls._apply(config.model_type, kwargs))

    @staticmethod
    def _apply(model_type: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns what is not Liger's."""
        own = {name: value for name, value in kwargs.items() if name in _CHOICES}
        _apply_liger_kernel(model_type, **own)
        return {name: value for name, value in kwargs.items() if name not in own}
