"""MONAI: a 3-D U-Net on crops, evaluated by a sliding window over whole volumes."""

import numpy as np
import torch
from monai.data import DataLoader, Dataset, decollate_batch, list_data_collate
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import (
    Activations,
    AsDiscrete,
    Compose,
    EnsureTyped,
    RandCropByPosNegLabeld,
    RandRotate90d,
)

KEYS = ["image", "mask"]
chance = np.random.default_rng(0)


def volume():
    image = chance.random((1, 96, 96, 96), dtype=np.float32)
    return {"image": image, "mask": (image > 0.5).astype(np.float32)}


volumes = [volume() for _ in range(8)]
crops = Compose(
    [
        EnsureTyped(keys=KEYS),
        RandCropByPosNegLabeld(
            keys=KEYS, label_key="mask", spatial_size=[64, 64, 64], pos=1, neg=1, num_samples=4
        ),
        RandRotate90d(keys=KEYS, prob=0.5, spatial_axes=[0, 2]),
    ]
)
train = DataLoader(
    Dataset(volumes, crops), batch_size=2, shuffle=True, collate_fn=list_data_collate,
    pin_memory=torch.cuda.is_available(),
)  # fmt: skip
held = DataLoader(Dataset(volumes[:4], EnsureTyped(keys=KEYS)), collate_fn=list_data_collate)
device = torch.device("cuda")
model = UNet(
    spatial_dims=3, in_channels=1, out_channels=1, channels=(16, 32, 64, 128, 256),
    strides=(2, 2, 2, 2), num_res_units=2,
).to(device)  # fmt: skip
loss_of = DiceLoss(sigmoid=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
metric = DiceMetric(include_background=True, reduction="mean")
decide = Compose([Activations(sigmoid=True), AsDiscrete(threshold=0.5)])
for _ in range(10):
    model.train()
    for batch in train:
        images, masks = (batch[key].to(device) for key in KEYS)
        optimizer.zero_grad()
        loss = loss_of(model(images), masks)
        loss.backward()
        optimizer.step()
        print(loss.item())
    model.eval()
    with torch.no_grad():
        for batch in held:
            images, masks = (batch[key].to(device) for key in KEYS)
            out = sliding_window_inference(images, (64, 64, 64), 4, model)
            metric(y_pred=[decide(item) for item in decollate_batch(out)], y=masks)
        print(metric.aggregate().item())
        metric.reset()
