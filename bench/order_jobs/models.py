"""Networks from the constructors of torchvision and transformers and a U-Net, with one batch.

Built under a fake tensor mode they cost no memory: sizes are those of the real networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torchvision import models
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from bench.recompute.convnets import UNet

CLASSES = 1000
PIXELS = 224
BERT_TOKENS = 128
GPT_TOKENS = 1024


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and one batch: what a step needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, ...]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]

    def loss_of_batch(self) -> torch.Tensor:
        """What a step trains on."""
        return self.loss(self.model, self.batch)


@dataclass(frozen=True)
class Case:
    """A step of the table."""

    name: str
    batch: int
    build: Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]
    roam: str = ""
    """The key of the network in ROAM's result files."""

    @property
    def key(self) -> str:
        return f"{self.name}_{self.batch}"

    def training(self) -> Training:
        """With Adam, parameter by parameter. Inside a fake tensor mode: of fake tensors."""
        with _without_init():
            model, batch = self.build(self.batch)
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
        return Training(model, optimizer, batch, self.loss)


@contextmanager
def _without_init() -> Iterator[None]:
    """`trunc_normal_` asks for values, which fake tensors do not have."""

    def as_it_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with mock.patch("torch.nn.init.trunc_normal_", as_it_is):
        yield


def _vision(name: str) -> Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    def build(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        images = torch.randn(batch, 3, PIXELS, PIXELS)
        return models.get_model(name, weights=None), (images, torch.randint(CLASSES, (batch,)))

    return build


def _classify(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _bert(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = BertConfig()
    return BertForMaskedLM(config), _tokens(config, batch, BERT_TOKENS)


def _gpt2_xl(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)
    return GPT2LMHeadModel(config), _tokens(config, batch, GPT_TOKENS)


def _llama_1b(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(config, batch, GPT_TOKENS)


def _tokens(config: Any, batch: int, count: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(config.vocab_size, (batch, count)),)


def _language(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    logits = model(input_ids=batch[0]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def _unet(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    images = torch.randn(batch, 3, 256, 256)
    return UNet(64, 4, 2), (images, torch.randint(2, (batch, 256, 256)))


VISION = {
    "alexnet": "AlexNet",
    "vgg16": "VGG",
    "mnasnet1_0": "MnasNet",
    "mobilenet_v2": "MobileNet",
    "efficientnet_b0": "EfficientNet",
    "vit_b_16": "ViT",
}
CASES = [
    *(
        Case(name, batch, _vision(name), _classify, roam)
        for name, roam in VISION.items()
        for batch in (1, 32)
    ),
    *(Case("bert_base", batch, _bert, _language, "BERT") for batch in (1, 32)),
    *(Case("gpt2_xl", batch, _gpt2_xl, _language) for batch in (1, 2, 4)),
    Case("llama_1b", 1, _llama_1b, _language),
    Case("unet", 4, _unet, _classify),
]
