"""kornia: augmentations on the GPU before a ResNet."""

import kornia
import torch
import torchvision
from kornia import augmentation as aug
from torch import nn

augment = nn.Sequential(
    aug.RandomHorizontalFlip(), aug.RandomAffine(360), aug.ColorJitter(0.2, 0.3, 0.2, 0.3),
    aug.RandomCrop((64, 64)), aug.RandomErasing(),
).cuda()  # fmt: skip
model = torchvision.models.resnet18(num_classes=10).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(50):
    images = torch.rand(64, 3, 80, 80).cuda()
    labels = torch.randint(0, 10, (64,)).cuda()
    with torch.no_grad():
        images = augment(images)
    out = model(images)
    like = kornia.losses.ssim_loss(images, images.roll(1, 0) * out.mean().sigmoid(), 5)
    (nn.functional.cross_entropy(out, labels) + like).backward()
    optimizer.step()
    optimizer.zero_grad()
