"""mmengine: its runner with mixed precision and an evaluation, as its README has it."""

import sys

from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet50


class Network(BaseModel):
    def __init__(self):
        super().__init__()
        self.resnet = resnet50()

    def forward(self, imgs, labels, mode):
        x = self.resnet(imgs)
        if mode == "loss":
            return {"loss": functional.cross_entropy(x, labels)}
        return x, labels


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        score, truth = data_samples
        correct = (score.argmax(dim=1) == truth).sum().cpu()
        self.results.append({"batch_size": len(truth), "correct": correct})

    def compute_metrics(self, results):
        total = sum(item["batch_size"] for item in results)
        return {"accuracy": 100 * sum(item["correct"] for item in results) / total}


def loader(part, shuffle):
    change = transforms.Compose([transforms.RandomCrop(224), transforms.ToTensor()])
    return DataLoader(ImageFolder(f"{sys.argv[1]}/{part}", change), batch_size=32, shuffle=shuffle)


runner = Runner(
    model=Network(),
    work_dir="work",
    train_dataloader=loader("train", True),
    optim_wrapper={
        "type": "AmpOptimWrapper",
        "optimizer": {"type": SGD, "lr": 0.001, "momentum": 0.9},
    },
    train_cfg={"by_epoch": True, "max_epochs": 5, "val_interval": 1},
    val_dataloader=loader("val", False),
    val_cfg={},
    val_evaluator={"type": Accuracy},
)
runner.train()
