"""The convolutional networks, from torchvision's constructors, and a U-Net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision import models

from bench.recompute.case import Case, CrossEntropy, PixelCrossEntropy, State, Training, Unit

CLASSES = 1000


def _training(
    module: nn.Module, batch: int, pixels: int, units: list[Unit], blocks: set[int]
) -> Training:
    images = torch.randn(batch, 3, pixels, pixels)
    return Training(module, (images,), CrossEntropy((batch,), CLASSES), units, frozenset(blocks))


def _fused(modules: list[Any]) -> list[Any]:
    """Every in-place module in one unit with what it follows: a cut between the two would keep a
    tensor that is then overwritten, which checkpointing refuses."""
    units: list[Any] = []
    for module in modules:
        if getattr(module, "inplace", False):
            units[-1] = nn.Sequential(units[-1], module)
        else:
            units.append(module)
    return units


def vgg(name: str, batch: int, pixels: int) -> Training:
    """Units are the children, ReLU with what it follows; convolutions are the blocks."""
    module = models.get_model(name, weights=None)
    features, classifier = _fused(list(module.features)), _fused(list(module.classifier))
    units: list[Unit] = [*features, module.avgpool, nn.Flatten(), *classifier]
    blocks = {at for at, unit in enumerate(features) if isinstance(unit, nn.Sequential)}
    return _training(module, batch, pixels, units, blocks)


def resnet(name: str, batch: int, pixels: int) -> Training:
    """Units are the stem's and head's modules and the bottlenecks, which are the blocks."""
    module = models.get_model(name, weights=None)
    stem = _fused([module.conv1, module.bn1, module.relu, module.maxpool])
    stages = (module.layer1, module.layer2, module.layer3, module.layer4)
    body: list[Unit] = [block for stage in stages for block in stage]
    head: list[Unit] = [module.avgpool, nn.Flatten(), module.fc]
    blocks = set(range(len(stem), len(stem) + len(body)))
    return _training(module, batch, pixels, stem + body + head, blocks)


def _dense_layer(layer: Any) -> Unit:
    return lambda *features: (*features, layer(list(features)))


def _concatenate(*features: torch.Tensor) -> torch.Tensor:
    return torch.cat(features, 1)


def densenet(name: str, batch: int, pixels: int) -> Training:
    """Units are dense layers, from features to features with one more; they are the blocks."""
    module = models.get_model(name, weights=None)
    units: list[Unit] = []
    blocks = set()
    for child in _fused(list(module.features)[:-1]):
        if isinstance(child, nn.ModuleDict):
            blocks |= set(range(len(units), len(units) + len(child)))
            units += [*map(_dense_layer, child.values()), _concatenate]
        else:
            units.append(child)

    def head(x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(module.features.norm5(x), inplace=True)
        return torch.flatten(nn.functional.adaptive_avg_pool2d(x, (1, 1)), 1)

    units += [head, module.classifier]
    return _training(module, batch, pixels, units, blocks)


def inception(batch: int, pixels: int) -> Training:
    """Units are the children in order; the mixed ones are the blocks. No auxiliary output."""
    module = models.inception_v3(weights=None, aux_logits=False, init_weights=False)
    named = dict(module.named_children())
    order = [name for name in named if name not in ("AuxLogits", "fc")]
    blocks = {at for at, name in enumerate(order) if name.startswith("Mixed")}
    units: list[Unit] = [*(named[name] for name in order), nn.Flatten(), module.fc]
    return _training(module, batch, pixels, units, blocks)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Ronneberger et al. 2015, padded, with batch norm and transposed convolutions."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double(before, after) for before, after in zip([3, *widths], widths, strict=False)
        )
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(_double(2 * b, b) for _, b in pairs)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped: list[torch.Tensor] = []
        for block in self.down:
            if skipped:
                x = self.pool(x)
            x = block(x)
            skipped.append(x)
        skipped.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((skipped.pop(), grow(x)), 1))
        return self.head(x)  # type: ignore[no-any-return]


def unet(batch: int, pixels: int, width: int, depth: int) -> Training:
    """Units are pairs of convolutions, the blocks; what skips them crosses the cuts too."""
    module = UNet(width, depth, classes=16)

    def down(block: nn.Module, first: bool) -> Callable[..., State]:
        def unit(*state: torch.Tensor) -> State:
            if first:
                return (block(*state),)
            return (*state, block(module.pool(state[-1])))

        return unit

    def up(grow: nn.Module, block: nn.Module) -> Callable[..., State]:
        def unit(*state: torch.Tensor) -> State:
            *kept, skipped, x = state
            return (*kept, block(torch.cat((skipped, grow(x)), 1)))

        return unit

    units: list[Unit] = [down(block, at == 0) for at, block in enumerate(module.down)]
    units += [up(grow, block) for grow, block in zip(module.grow, module.up, strict=True)]
    blocks = frozenset(range(len(units)))
    images = torch.randn(batch, 3, pixels, pixels)
    loss = PixelCrossEntropy((batch, pixels, pixels), 16)
    return Training(module, (images,), loss, [*units, module.head], blocks)


def _named(name: str, make: Callable[..., Training], batch: int, pixels: int) -> Case:
    key = name.replace("resnet", "resnet-").replace("densenet", "densenet-").replace("vgg", "vgg-")
    says = f"torchvision {name}, {batch} × 3 × {pixels} × {pixels}"
    return Case(key, says, lambda: make(name, batch, pixels))


CASES = [
    _named("vgg16", vgg, 4, 96),
    _named("vgg19", vgg, 4, 96),
    _named("resnet50", resnet, 8, 96),
    _named("resnet101", resnet, 8, 96),
    _named("resnet152", resnet, 8, 96),
    _named("densenet121", densenet, 16, 96),
    _named("densenet201", densenet, 4, 96),
    Case(
        "inception-v3",
        "torchvision inception_v3 without the auxiliary classifier, 4 × 3 × 128 × 128",
        lambda: inception(4, 128),
    ),
    Case(
        "u-net",
        "4 levels of 24 to 384 channels, batch norm, 16 classes, 4 × 3 × 128 × 128",
        lambda: unet(4, 128, 24, 4),
    ),
]
