"""effdet: EfficientDet-D0 with its training bench, on random pictures and boxes."""

import torch
from effdet import create_model

model = create_model(
    "tf_efficientdet_d0", bench_task="train", bench_labeler=True, num_classes=20, pretrained=False,
    pretrained_backbone=False,
).cuda()  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(100):
    images = torch.randn(8, 3, 512, 512).cuda()
    corner = torch.rand(8, 10, 2) * 256
    target = {
        "bbox": torch.cat([corner, corner + 64 + torch.rand(8, 10, 2) * 128], dim=2).cuda(),
        "cls": torch.randint(1, 21, (8, 10)).float().cuda(),
    }
    loss = model(images, target)["loss"]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {loss.item()}")
