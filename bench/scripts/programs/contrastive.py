"""lightly: SimCLR on a folder of pictures."""

import sys

import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms.simclr_transform import SimCLRTransform
from torch import nn


class SimCLR(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = SimCLRProjectionHead(512, 512, 128)

    def forward(self, x):
        return self.head(self.backbone(x).flatten(start_dim=1))


if __name__ == "__main__":
    resnet = torchvision.models.resnet18()
    model = SimCLR(nn.Sequential(*list(resnet.children())[:-1])).to("cuda")
    transform = SimCLRTransform(input_size=32, gaussian_blur=0.0)
    dataset = LightlyDataset(sys.argv[1], transform=transform)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=64, shuffle=True, drop_last=True, num_workers=2
    )
    loss_of = NTXentLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06)
    for epoch in range(10):
        total = 0
        for batch in loader:
            first, second = (view.to("cuda") for view in batch[0])
            loss = loss_of(model(first), model(second))
            total += loss.detach()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}, loss {total / len(loader):.5f}")
