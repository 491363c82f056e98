"""An image classifier trained the way the convolution rows of `jobs.csv` were.

An ordinary script: it knows nothing of memplan. The order of statements, and which names stay
bound, decide the peak, so both follow the description of the measured jobs to the letter.
"""

from __future__ import annotations

import argparse

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset

IMAGE_SIZE = 86
TEN_CLASSES = ("mnasnet", "mobilenetv3")
ALIASES = {"mnasnet": "mnasnet1_0"}


class Images(Dataset[tuple[torch.Tensor, int]]):
    """`length` pictures of 3 x 86 x 86 fp32; the content does not matter, so all are one."""

    def __init__(self, length: int, classes: int) -> None:
        self.length = length
        self.classes = classes
        self.image = torch.rand(3, IMAGE_SIZE, IMAGE_SIZE)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % self.classes


def plain(name: str) -> str:
    """`ConvNeXtBase`, `convnext_base` and `MobeNetV3Large` in one spelling."""
    letters = "".join(character for character in name.lower() if character.isalnum())
    return letters.replace("mobenet", "mobilenet")


def constructor_name(name: str) -> str:
    """The torchvision constructor a row means. Raises SystemExit when there is none."""
    known: dict[str, str] = {
        plain(known): known for known in torchvision.models.list_models(torchvision.models)
    }
    wanted = plain(ALIASES.get(plain(name), name))
    if wanted not in known:
        raise SystemExit(f"no torchvision model is called {name!r}")
    return known[wanted]


def classes_of(name: str) -> int:
    """How many outputs the measured job had: 10 for MnasNet and MobileNetV3, else 1000."""
    return 10 if plain(name).startswith(TEN_CLASSES) else 1000


def build(name: str) -> nn.Module:
    """The model with random weights, on the default device."""
    model: nn.Module = torchvision.models.get_model(
        constructor_name(name), weights=None, num_classes=classes_of(name)
    )
    return model


def train(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    model = build(options.model).to(device)
    model.train()
    optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    criterion = nn.CrossEntropyLoss()
    images = Images(options.batch_size * options.iterations, classes_of(options.model))
    loader = DataLoader(images, batch_size=options.batch_size)

    for inputs, labels in loader:
        if options.zero_grad_mode == 0:
            optimizer.zero_grad()
        inputs = inputs.to(device)
        labels = labels.to(device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        if options.zero_grad_mode == 1:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _, _predictions = torch.max(outputs, 1)
        if options.zero_grad_mode == 2:
            optimizer.zero_grad()
        scheduler.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="as torchvision or jobs.csv spells it")
    parser.add_argument("--optimizer", required=True, help="a class of torch.optim")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--zero-grad-mode", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
