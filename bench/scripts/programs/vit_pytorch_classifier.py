"""vit-pytorch: the model of its README, trained on random pictures."""

import torch
from vit_pytorch import ViT

model = ViT(
    image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=6, heads=16, mlp_dim=2048,
    dropout=0.1, emb_dropout=0.1,
).cuda()  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)
loss_of = torch.nn.CrossEntropyLoss()
for _ in range(100):
    images = torch.randn(32, 3, 256, 256).cuda()
    labels = torch.randint(0, 1000, (32,)).cuda()
    optimizer.zero_grad()
    loss_of(model(images), labels).backward()
    optimizer.step()
