"""segmentation-models-pytorch: an FPN on a ResNet, with its Dice loss and its metrics."""

import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.rand(3, 256, 256), (torch.rand(1, 256, 256) > 0.5).long()


if __name__ == "__main__":
    model = smp.create_model("FPN", "resnet34", encoder_weights=None, in_channels=3, classes=1)
    model = model.cuda()
    loss_of = smp.losses.DiceLoss("binary", from_logits=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    train = DataLoader(Shapes(), batch_size=8, shuffle=True, num_workers=2)
    held = DataLoader(Shapes(), batch_size=32)
    for epoch in range(40):
        model.train()
        for images, masks in train:
            loss = loss_of(model(images.cuda()), masks.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        found = []
        for images, masks in held:
            with torch.no_grad():
                predicted = (model(images.cuda()).sigmoid() > 0.5).long()
            found.append(smp.metrics.get_stats(predicted, masks.cuda(), mode="binary"))
        counts = [torch.cat(kind) for kind in zip(*found, strict=True)]
        print(epoch, smp.metrics.iou_score(*counts, reduction="micro").item())
