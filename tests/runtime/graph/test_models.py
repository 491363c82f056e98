"""What models do in a step: each leaves the bits of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.runtime.graph.training import (
    Job,
    assert_as_plain,
    assert_captured,
    captures_steps,
    classifier,
    perceptron,
)

pytestmark = captures_steps


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """Its update writes to the gradient."""
    return torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1)


class Norm(nn.Module):
    """Convolution, batch norm and dropout: buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.first(x)), inplace=True))
        return self.last(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int = 6) -> None:
        super().__init__()
        self.cells: Any = kind(6, width, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x.unflatten(0, (1, -1)).expand(3, -1, -1))[0].mean(0))


class Attention(nn.Module):
    """A transformer whose output is its embedding: a weight that is used twice."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 12, padding_idx=0)
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(12, 16, bias=False)
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.tokens(x)))


class Written(nn.Module):
    """Views that are written, random operators in place, buffers in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.noise = nn.RReLU(inplace=True)
        self.register_buffer("table", torch.zeros(10))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).clone()
        table, count = self.get_buffer("table"), self.get_buffer("count")
        with torch.no_grad():
            table[2:6].lerp_(h.mean(0), 0.1)
            count += 1
        h.t()[0].fill_(0.5)
        h[:, 1:3].mul_(table[2:4] + table.sum())
        return self.noise(h) + torch.rand_like(h) + torch.randn(4) / count


class Halves(nn.Module):
    """Lists of views: what they are views of is needed once more, and could be written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.layer(x) + 1
        first, second = whole.chunk(2, -1)
        turned = whole * 0.5 + torch.cat((-second, first), -1)
        one, two = (turned * 1).unflatten(-1, (2, 4)).unbind(1)
        return (turned * 2).unflatten(-1, (4, 2)).sum(-1) + one * two


class Shared(nn.Module):
    """Two parameters whose gradients are one tensor, and one whose gradient is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(5, 4))
        self.two = nn.Parameter(torch.randn(5, 4))
        self.three = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] * (self.one + self.two) + self.three.sum() + x[:, :1]


class Added(nn.Module):
    """The gradient of what is added is read again, by that of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.added = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last((self.first(x) + self.added).tanh())
        return found


class Experts(nn.Module):
    """Indices that depend on data, of sizes that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return (torch.einsum("bd,bkdo->bko", x, self.experts[chosen]) * weights[..., None]).sum(1)


class Convolutions(nn.Module):
    """A U-Net of two levels, in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.below = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 4, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        y = self.up(self.below(F.max_pool2d(x, 2)))
        y = F.interpolate(y, size=x.shape[-2:], mode="bilinear")
        return self.last(torch.cat([x, y], 1)).amax((2, 3))


def frozen() -> nn.Module:
    model = perceptron()
    next(model.parameters()).requires_grad_(False)
    return model


IMAGES = (4, 3, 6, 6)
MODELS: dict[str, Callable[[], Job]] = {
    "norm": lambda: classifier(Norm, adam, IMAGES),
    "lstm": lambda: classifier(lambda: Recurrent(nn.LSTM), adam, (3, 6)),
    "gru": lambda: classifier(lambda: Recurrent(nn.GRU, 64), adam, (3, 6)),
    "views": lambda: classifier(Written, adam),
    "halves": lambda: classifier(Halves, adam),
    "shared gradients": lambda: classifier(Shared, adam),
    "gradient that is read again": lambda: classifier(Added, decayed),
    "experts": lambda: classifier(Experts, adam),
    "u-net": lambda: classifier(Convolutions, adam, IMAGES),
    "frozen": lambda: classifier(frozen, adam),
    "instance norm": lambda: classifier(
        lambda: nn.Sequential(nn.InstanceNorm1d(5, affine=True), nn.Linear(6, 4)), adam
    ),
    "spectral norm": lambda: classifier(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))), adam
    ),
    "double": lambda: doubled(),
    "rows": lambda: rows(),
}


def rows() -> Job:
    """A batch norm on the CPU gives rows of what does not lie in rows, so that the view behind it
    is a copy; and a squared error that is reduced keeps the memory of all errors."""
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 6)
    first, norm, last = layers

    def loss_fn(x: Tensor) -> Tensor:
        normal = norm(first(x).transpose(1, 2)).transpose(1, 2)
        return F.mse_loss(last(normal.reshape(-1, 16)), x.reshape(-1, 6))

    job = classifier(lambda: nn.Sequential(*layers), adam, (8, 5, 6))
    job.batches = [(x,) for x, _ in job.batches]
    job.loss_fn = loss_fn
    return job


def test_numbers_that_are_saved_for_backward() -> None:
    """A count, of which the graph knows that it is one."""

    def make() -> Job:
        job = classifier(make=adam)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            count = (y > 1).sum().item()
            return (job.model(x).square() * torch.sym_max(count, 1)).sum()

        job.loss_fn = loss_fn
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


def doubled() -> Job:
    job = classifier(make=adam)
    job.model.double()
    job.batches = [(x.double(), y) for x, y in job.batches]
    return job


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, keep: bool) -> None:
    step, _ = assert_as_plain(MODELS[name], keep_gradients=keep)
    assert_captured(step, 4)


def test_gates_that_would_lie_in_other_rows_run_plainly() -> None:
    """Eager cells on the CPU write into parts of one tensor; a sigmoid of a short row has other
    last bits than one of all rows."""
    step, _ = assert_as_plain(lambda: classifier(lambda: Recurrent(nn.GRU, 8), adam))
    assert "recurrent cell" in step.report().fallback


def language_model(tied: bool = True) -> Job:
    model = Attention(tied)
    generator = torch.Generator().manual_seed(5)
    tokens = [(torch.randint(16, (2, 7), generator=generator),) for _ in range(4)]

    def loss_fn(x: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out[:, :-1].reshape(-1, 16), x[:, 1:].reshape(-1))

    return Job(model, [torch.optim.AdamW(model.parameters(), 0.01)], loss_fn, tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers(tied: bool) -> None:
    step, _ = assert_as_plain(lambda: language_model(tied), keep_gradients=tied)
    assert_captured(step, 4)


def test_a_model_of_the_transformers_library() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}

    def make() -> Job:
        job = language_model()
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
        optimizers = [torch.optim.AdamW(model.parameters(), 0.01)]

        def loss_fn(x: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=x, labels=x, use_cache=False).loss
            return loss

        return Job(model, optimizers, loss_fn, job.batches)

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


@pytest.mark.parametrize(
    "of",
    [
        lambda x: torch.addcdiv(x, x, x.exp(), value=3.14),
        lambda x: x.clone().addcdiv_(x, x.exp(), value=3.14),
        lambda x: x.clone().addcmul_(x, x.exp(), value=3.14),
    ],
)
def test_operators_that_dynamo_decomposes_stay_whole(of: Callable[[Tensor], Tensor]) -> None:
    def make() -> Job:
        job = classifier()
        job.loss_fn = lambda x, y: of(job.model(x)).sum()
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


@pytest.mark.parametrize("trains", [False, True])
def test_a_gradient_of_a_product_of_elements_runs_plainly(trains: bool) -> None:
    def make() -> Job:
        job = classifier()

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            out = job.model(x)
            return (out if trains else out.detach()).prod(1).sum() * torch.prod(x) + out.sum()

        job.loss_fn = loss_fn
        return job

    step, _ = assert_as_plain(make)
    assert ("torch.prod" in step.report().fallback) == trains


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda out: -out.abs().max(),
    "nanmedian": lambda out: -torch.nanmedian(out),
    "masked_fill": lambda out: out.masked_fill(out > 0, out.sum()).sum(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_that_a_trace_computes_by_another_formula_run_plainly(name: str) -> None:
    def make() -> Job:
        job = classifier()
        job.loss_fn = lambda x, y: FORMULAS[name](job.model(x)) + torch.max(x)
        return job

    step, _ = assert_as_plain(make)
    assert f"a gradient of torch.{name}" in step.report().fallback


OVERLAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda out: out + out.t(),
    "rows": lambda out: out.index_put((torch.tensor([2, 3]),), out[:2], accumulate=True),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_an_operator_with_a_view_of_its_first_operand_stays_as_it_is(name: str) -> None:
    """That operand was itself computed in the place of another one."""

    def make() -> Job:
        job = classifier()
        job.loss_fn = lambda x, y: OVERLAPS[name](job.model(x).t() @ job.model(x) + 1).sin().sum()
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)
