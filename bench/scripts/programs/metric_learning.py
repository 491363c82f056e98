"""pytorch-metric-learning: triplets that a miner picks, on MNIST."""

import sys

import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import nn
from torchvision import datasets, transforms

device = torch.device("cuda")
data = datasets.MNIST(sys.argv[1], train=True, transform=transforms.ToTensor())
loader = torch.utils.data.DataLoader(data, batch_size=256, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(9216, 128),
).to(device)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
distance = distances.CosineSimilarity()
loss_of = losses.TripletMarginLoss(
    margin=0.2, distance=distance, reducer=reducers.ThresholdReducer(low=0)
)
miner = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")
for epoch in range(2):
    model.train()
    for number, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        embeddings = model(images)
        loss = loss_of(embeddings, labels, miner(embeddings, labels))
        loss.backward()
        optimizer.step()
        if number % 20 == 0:
            print(epoch, number, loss.item(), miner.num_triplets)
