"""pytorch-ignite: its engines for training and evaluation, on MNIST."""

import sys

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

train = DataLoader(MNIST(sys.argv[1], transform=ToTensor()), batch_size=64, shuffle=True)
held = DataLoader(MNIST(sys.argv[1], train=False, transform=ToTensor()), batch_size=1000)
model = nn.Sequential(
    nn.Conv2d(1, 10, 5), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.ReLU(), nn.Flatten(),
    nn.Linear(8000, 10),
).to("cuda")  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
loss_of = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, optimizer, loss_of, device="cuda")
metrics = {"accuracy": Accuracy(), "loss": Loss(loss_of)}
evaluator = create_supervised_evaluator(model, metrics=metrics, device="cuda")


@trainer.on(Events.ITERATION_COMPLETED(every=10))
def log(engine):
    print(engine.state.iteration, engine.state.output)


@trainer.on(Events.EPOCH_COMPLETED)
def validate(engine):
    evaluator.run(held)
    print(engine.state.epoch, evaluator.state.metrics)


keep = ModelCheckpoint("kept", score_function=lambda e: e.state.metrics["accuracy"], n_saved=2)
evaluator.add_event_handler(Events.COMPLETED, keep, {"model": model})
trainer.run(train, max_epochs=10)
