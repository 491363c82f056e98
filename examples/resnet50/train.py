"""Train a torchvision ResNet on images: SGD, mixed precision, an evaluation pass every epoch."""

from __future__ import annotations

import argparse

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms

Batches = DataLoader[tuple[torch.Tensor, torch.Tensor]]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_loaders(args: argparse.Namespace) -> tuple[Batches, Batches]:
    """Training and evaluation batches. `FakeData` stands where `ImageFolder` would."""
    finish = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    train = torchvision.datasets.FakeData(
        args.train_images,
        (3, args.image_size, args.image_size),
        args.classes,
        transforms.Compose(
            [
                transforms.RandomResizedCrop(args.image_size, scale=(0.35, 1.0)),
                transforms.RandomHorizontalFlip(),
                *finish,
            ]
        ),
    )
    test = torchvision.datasets.FakeData(
        args.test_images,
        (3, args.image_size, args.image_size),
        args.classes,
        transforms.Compose(finish),
    )
    common = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    return (
        DataLoader(train, args.batch_size, shuffle=True, drop_last=True, **common),
        DataLoader(test, args.batch_size, **common),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: Batches, device: torch.device, amp: bool) -> float:
    """Share of the test images that are classified rightly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=device)
    seen = 0
    for images, labels in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
            predicted = model(images).argmax(dim=1)
        correct += (predicted == labels).sum()
        seen += len(labels)
    model.train()
    return correct.item() / seen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--train-images", type=int, default=512)
    parser.add_argument("--test-images", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", help="where to write the weights at the end")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    device = torch.device(args.device)
    train, test = make_loaders(args)

    model = torchvision.models.get_model(args.arch, num_classes=args.classes)
    model = model.to(device, memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        nesterov=True,
    )
    steps = max(1, args.epochs * len(train))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)

    model.train()
    for epoch in range(args.epochs):
        for step, (images, labels) in enumerate(train):
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        print(f"epoch {epoch}: accuracy {evaluate(model, test, device, args.amp):.1%}")

    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
