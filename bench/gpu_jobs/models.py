"""The networks of the GPU jobs: random weights, no downloads, batches made on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Knobs(NamedTuple):
    """What the command line decides about a model."""

    batch: int
    length: int
    """Tokens of a text, or pixels of a picture's side."""
    dropout: float = 0.0
    sdpa: str = ""
    """A key of `BACKENDS`, or empty for PyTorch's own choice."""
    mask: bool = False
    checkpoint: bool = False
    layers: int = 0
    """0 keeps the model's own depth (a decoder's; pictures' networks have theirs)."""


class Job(NamedTuple):
    """A model, a batch of host tensors, and the loss of that batch."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]


def attention_choice(name: str) -> AbstractContextManager[Any]:
    """PyTorch restricted to one attention kernel, or left alone."""
    return sdpa_kernel(BACKENDS[name]) if name else nullcontext()


class Block(nn.Module):
    """A pre-norm transformer block on `scaled_dot_product_attention`."""

    def __init__(self, hidden: int, heads: int, knobs: Knobs) -> None:
        super().__init__()
        self.heads, self.knobs = heads, knobs
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.dropout = nn.Dropout(knobs.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.knobs.dropout if self.training else 0.0
        with attention_choice(self.knobs.sdpa):
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
            )
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, hidden)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return out


class Decoder(nn.Module):
    """A small language model whose attention kernel, mask and dropout can be chosen."""

    def __init__(self, knobs: Knobs, hidden: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.knobs = knobs
        self.embed = nn.Embedding(32000, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, knobs) for _ in range(knobs.layers or 8))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 32000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = None
        if self.knobs.mask:
            size = tokens.size(1)
            mask = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril()[None, None]
        x = self.embed(tokens)
        for block in self.blocks:
            if self.knobs.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Lstm(nn.Module):
    """A language model on cuDNN's LSTM."""

    def __init__(self, knobs: Knobs) -> None:
        super().__init__()
        self.embed = nn.Embedding(10000, 650)
        self.lstm = nn.LSTM(650, 650, num_layers=2, dropout=knobs.dropout, batch_first=True)
        self.head = nn.Linear(650, 10000)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return logits


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The U-Net of 2015 with padded convolutions and BatchNorm, 31 million parameters."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(
            _double_convolution(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(_double_convolution(a, b) for a, b in pairs)
        self.head = nn.Conv2d(64, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for step in self.down[:-1]:
            x = step(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for rise, step in zip(self.raise_, self.up, strict=True):
            x = step(torch.cat((kept.pop(), rise(x)), dim=1))
        logits: Tensor = self.head(x)
        return logits


def _next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


def _classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def _hugging_face(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _tokens(knobs: Knobs, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (knobs.batch, knobs.length))


def _pictures(knobs: Knobs, classes: int) -> dict[str, Tensor]:
    images = torch.rand(knobs.batch, 3, knobs.length, knobs.length)
    return {"images": images, "labels": torch.randint(0, classes, (knobs.batch,))}


def _gpt2(knobs: Knobs) -> Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    p = knobs.dropout
    config = GPT2Config(
        n_layer=knobs.layers or 12, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False
    )
    tokens = _tokens(knobs, 50257)
    return Job(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, _hugging_face)


def _llama(knobs: Knobs) -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=knobs.layers or 22,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if knobs.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = _tokens(knobs, 32000)
    return Job(model, {"input_ids": tokens, "labels": tokens}, _hugging_face)


def _bert(knobs: Knobs) -> Job:
    from transformers import BertConfig, BertForMaskedLM

    p = knobs.dropout
    config = BertConfig(
        num_hidden_layers=knobs.layers or 12,
        hidden_dropout_prob=p,
        attention_probs_dropout_prob=p,
    )
    tokens = _tokens(knobs, 30522)
    batch = {"input_ids": tokens, "labels": tokens}
    if knobs.mask:
        kept = torch.arange(knobs.length) < torch.linspace(8, knobs.length, knobs.batch)[:, None]
        batch["attention_mask"] = kept.long()
    return Job(BertForMaskedLM(config), batch, _hugging_face)


def _torchvision(name: str) -> Callable[[Knobs], Job]:
    def build(knobs: Knobs) -> Job:
        import torchvision

        model = torchvision.models.get_model(name, weights=None)
        return Job(model, _pictures(knobs, 1000), _classify)

    return build


def _unet(knobs: Knobs) -> Job:
    batch = _pictures(knobs, 2)
    batch["labels"] = torch.randint(0, 2, (knobs.batch, knobs.length, knobs.length))
    return Job(UNet(), batch, _classify)


MODELS: dict[str, Callable[[Knobs], Job]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "vit": _torchvision("vit_b_16"),
    "resnet50": _torchvision("resnet50"),
    "convnext": _torchvision("convnext_tiny"),
    "unet": _unet,
    "decoder": lambda knobs: Job(Decoder(knobs), {"tokens": _tokens(knobs, 32000)}, _next_token),
    "lstm": lambda knobs: Job(Lstm(knobs), {"tokens": _tokens(knobs, 10000)}, _next_token),
}
