"""GPyTorch: exact regression of a sine, as its first tutorial trains it, on 4,000 points."""

import math

import gpytorch
import torch

x = torch.linspace(0, 1, 4_000).cuda()
y = torch.sin(x * (2 * math.pi)) + torch.randn(x.size(), device="cuda") * math.sqrt(0.04)


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
model = Regression(x, y, likelihood).cuda()
model.train()
likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
likelihood_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for iteration in range(50):
    optimizer.zero_grad()
    loss = -likelihood_of(model(x), y)
    loss.backward()
    print(iteration, loss.item(), model.covar_module.base_kernel.lengthscale.item())
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    found = likelihood(model(torch.linspace(0, 1, 51).cuda()))
    lower, upper = found.confidence_region()
print(found.mean.cpu().numpy(), lower.cpu().numpy(), upper.cpu().numpy())
