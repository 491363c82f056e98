"""A timm model trained the way the rows of `timm_rtx3090.csv` were measured.

An ordinary script: it knows nothing of memplan. The step is that of timm's `benchmark.py` with
PyTorch 1.12: fp16 autocast over forward, loss and backward, SGD with Nesterov momentum tensor by
tensor, gradients set to zero and not let go, attention written out.
"""

from __future__ import annotations

import argparse

import timm
import torch
from timm.layers import set_fused_attn
from torch import nn


def train(options: argparse.Namespace) -> None:
    torch.backends.cudnn.benchmark = True
    set_fused_attn(False)
    device = torch.device("cuda")
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    sized = {"img_size": options.image_size}
    try:
        model = timm.create_model(options.model, **sized)
    except TypeError:  # a network of convolutions takes pictures of any size
        model = timm.create_model(options.model)
    model = model.to(device=device, memory_format=layout).train()
    size = (options.batch_size, 3, options.image_size, options.image_size)
    images = torch.randn(size, device=device).contiguous(memory_format=layout)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False
    )
    for _ in range(options.steps):
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.float16):
            output = model(images)
            if isinstance(output, tuple):
                output = output[0]
            labels = torch.empty(len(output), device=device, dtype=torch.long)
            criterion(output, labels.random_(model.num_classes)).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="as timm spells it")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--image-size", type=int, required=True)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
