"""Parameters that are frozen, shared, adapted or changed while backward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from memplan.runtime.tape import Decisions
from memplan.types.errors import RecomputeError
from tests.runtime.harness import Job, check, everything, outcome


class Mlp(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x)) + x
        return x


def step(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad]


def test_frozen_layers() -> None:
    def model() -> nn.Module:
        mlp = Mlp()
        mlp.layers[0].requires_grad_(False)
        mlp.layers[1].weight.requires_grad_(False)
        return mlp

    check(Job(model, step))


def test_everything_frozen_but_the_input() -> None:
    check(Job(lambda: Mlp().requires_grad_(False), step))


def test_lora() -> None:
    peft = pytest.importorskip("peft")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = peft.LoraConfig(
                r=2, lora_dropout=0.2, target_modules=r"layers\.[02]", init_lora_weights=False
            )
            self.inner = peft.get_peft_model(Mlp(), config)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    check(Job(Wrapped, step))


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(10, 8, padding_idx=3), Mlp(2)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.body(self.embed(tokens)))

    def step(model: Any) -> list[Any]:
        tokens = torch.randint(0, 10, (4, 6))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return [loss]

    check(Job(Tied, step))


def test_embeddings() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.renormed = nn.Embedding(10, 8, max_norm=0.7)
            self.bag = nn.EmbeddingBag(10, 8, mode="max")
            self.sparse = nn.Embedding(10, 8, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = torch.sin(self.renormed.weight[:6] * 1.0) + self.renormed(tokens).mean(0)
            return torch.exp(x * self.bag(tokens[:, :6].t()) * self.sparse(tokens[0]))

    def step(model: Any) -> list[Any]:
        loss = model(torch.randint(0, 10, (4, 6))).square().mean()
        loss.backward()
        return [loss]

    check(Job(Embeds, step))


def test_parametrizations() -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x.triu() + x.triu(1).transpose(-1, -2))

    def model() -> nn.Module:
        mlp = Mlp()
        for layer in mlp.layers:
            parametrize.register_parametrization(layer, "weight", Symmetric())
        return mlp

    def cached(model: Any) -> list[Any]:
        with parametrize.cached():
            return step(model)

    check(Job(model, step))
    check(Job(model, cached))


def test_an_optimizer_that_steps_while_backward_runs() -> None:
    """Later layers are changed already when earlier ones are recomputed."""

    def fused(model: Any) -> list[Any]:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.5)

            def apply(parameter: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(apply)
        return [*step(model), *(p.detach() for p in model.parameters())]

    check(Job(Mlp, fused))


def test_a_parameter_changed_before_backward_is_an_error_that_names_it() -> None:
    def spoiled(model: Any) -> list[Any]:
        loss = model(torch.randn(6, 8)).square().mean()
        with torch.no_grad():
            model.layers[0].bias.add_(1)
        loss.backward()
        return [loss]

    job = Job(Mlp, spoiled)
    outcome(job)  # plainly, nobody needs the bias
    with pytest.raises(RecomputeError, match=r"shape \[8\], was modified in place") as raised:
        outcome(job, everything(Job(Mlp, step)))
    assert raised.value.hint


def test_a_weight_changed_before_backward_is_an_error_with_and_without_a_tape() -> None:
    def spoiled(model: Any) -> list[Any]:
        loss = model(torch.randn(6, 8, requires_grad=True)).square().mean()
        with torch.no_grad():
            model.layers[2].weight.mul_(2)
        loss.backward()
        return [loss]

    for decisions in (None, Decisions({}), everything(Job(Mlp, step))):
        with pytest.raises(
            (RuntimeError, RecomputeError), match=r"modified (by an inplace|in place)"
        ):
            outcome(Job(Mlp, spoiled), decisions)
