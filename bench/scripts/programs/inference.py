"""Pyro: a variational autoencoder by stochastic variational inference, as its tutorial has it."""

import sys

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

PIXELS, HIDDEN, LATENT = 784, 400, 50


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(LATENT, HIDDEN)
        self.pixels = nn.Linear(HIDDEN, PIXELS)

    def forward(self, z):
        return torch.sigmoid(self.pixels(nn.functional.softplus(self.hidden(z))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(PIXELS, HIDDEN)
        self.place = nn.Linear(HIDDEN, LATENT)
        self.scale = nn.Linear(HIDDEN, LATENT)

    def forward(self, x):
        hidden = nn.functional.softplus(self.hidden(x))
        return self.place(hidden), torch.exp(self.scale(hidden))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.cuda()

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            place = x.new_zeros((x.shape[0], LATENT))
            z = pyro.sample("latent", dist.Normal(place, torch.ones_like(place)).to_event(1))
            pixels = dist.Bernoulli(self.decoder(z), validate_args=False).to_event(1)
            pyro.sample("obs", pixels, obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("latent", dist.Normal(*self.encoder(x)).to_event(1))


autoencoder = Autoencoder()
images = DataLoader(MNIST(sys.argv[1], transform=ToTensor()), batch_size=256, shuffle=True)
svi = SVI(autoencoder.model, autoencoder.guide, ClippedAdam({"lr": 1e-3}), loss=Trace_ELBO())
for epoch in range(10):
    total = 0.0
    for x, _ in images:
        total += svi.step(x.reshape(-1, PIXELS).cuda())
    print(f"epoch {epoch}: {total / len(images.dataset):.4f}")
