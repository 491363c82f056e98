"""Logits in chunks: the plain loss and gradients but for rounding, and never logits as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memplan.runtime.loss import ChunkedLoss
from memplan.types.plan import LossHead, LossPart

CLASSES, FEATURES, ROWS = 997, 24, 50
BATCH, LENGTH = 4, 60
PART = LossPart(heads=[LossHead(CLASSES, FEATURES)], rows=ROWS)


class Model(nn.Module):
    def __init__(self, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.hidden = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(F.gelu(self.hidden(self.embedding(tokens))))
        return logits


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator has made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.shape != (CLASSES, FEATURES):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return result


def shifted(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, CLASSES).float(), tokens[:, 1:].reshape(-1)
    )


def smoothed(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), tokens, ignore_index=3, label_smoothing=0.1)


def weighted(logits: Tensor, tokens: Tensor) -> Tensor:
    logits = torch.tanh(logits / 3) * 3
    weight = torch.linspace(1, 2, CLASSES)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), weight)


def in_two_steps(logits: Tensor, tokens: Tensor) -> Tensor:
    rows = F.log_softmax(logits.view(-1, CLASSES) / 0.7, dim=-1)
    return F.nll_loss(rows, tokens.flatten(), reduction="sum")


def gathered(logits: Tensor, tokens: Tensor) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return -(chosen * torch.linspace(0, 1, LENGTH)).mean()


def logsumexp(logits: Tensor, tokens: Tensor) -> Tensor:
    chosen = torch.gather(logits, -1, tokens[..., None])[..., 0]
    return (torch.logsumexp(logits, -1) - chosen).mean()


def in_parts(logits: Tensor, tokens: Tensor) -> Tensor:
    pairs = zip(logits.split(2, 0), tokens.split(2), strict=True)
    losses = [F.cross_entropy(part.flatten(0, 1), label.flatten()) for part, label in pairs]
    return torch.stack(losses).mean()


def masked(logits: Tensor, tokens: Tensor) -> Tensor:
    counted = tokens % 3 == 0
    return F.cross_entropy(logits[counted], tokens[counted], reduction="none").mean()


def with_accuracy(logits: Tensor, tokens: Tensor) -> Tensor:
    assert logits.argmax(dim=-1).shape == tokens.shape
    assert logits.shape[-1] == CLASSES and len(logits) == BATCH and logits.dim() == 3
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), tokens.reshape(-1))


def held_without_gradients(logits: Tensor, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        held = logits.view(-1, CLASSES)
    loss = F.cross_entropy(logits.view(-1, CLASSES), tokens.flatten())
    return loss + F.cross_entropy(held, tokens.flatten())


REDUCTIONS = [
    shifted,
    smoothed,
    weighted,
    in_two_steps,
    gathered,
    logsumexp,
    in_parts,
    masked,
    with_accuracy,
]
Loss = Callable[[Tensor, Tensor], Tensor]


def trained(loss: Loss, *, chunked: bool, **options: bool) -> tuple[list[Tensor], int]:
    """The loss and all gradients, and the elements of the largest tensor."""
    torch.manual_seed(7)
    model = Model(**options)
    tokens = torch.randint(CLASSES, (BATCH, LENGTH))
    with Largest() as largest, in_effect(chunked):
        value = loss(model(tokens), tokens)
        value.backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [value.detach(), *gradients], largest.elements


@contextmanager
def in_effect(chunked: bool) -> Iterator[None]:
    if not chunked:
        yield
        return
    with ChunkedLoss(PART):
        yield


def assert_alike(one: list[Tensor], other: list[Tensor], tolerance: float = 1e-4) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.dtype == right.dtype
        assert (left - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", REDUCTIONS)
def test_a_loss_in_chunks_is_the_plain_one_but_for_rounding(loss: Loss, tied: bool) -> None:
    plain, whole = trained(loss, chunked=False, tied=tied, bias=not tied)
    chunked, largest = trained(loss, chunked=True, tied=tied, bias=not tied)
    assert_alike(chunked, plain)
    assert whole >= BATCH * LENGTH * CLASSES * 0.3
    assert largest <= ROWS * CLASSES


def entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    chances = logits.softmax(-1)
    return -(chances * chances.log()).sum(-1).mean() + shifted(logits, tokens)


def probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), F.one_hot(tokens.flatten(), CLASSES).float())


def hooked(logits: Tensor, tokens: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 2)
    return shifted(logits, tokens)


def looked_at_first(logits: Tensor, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits.softmax(-1).max()
        held = logits.float()
    return shifted(logits, tokens) + held.pow(2).mean()


def looked_at_in_inference(logits: Tensor, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits.softmax(-1).max()
    return shifted(logits, tokens)


@pytest.mark.parametrize(
    "loss",
    [
        entropy,
        probabilities,
        hooked,
        looked_at_first,
        looked_at_in_inference,
        held_without_gradients,
    ],
)
def test_what_needs_the_logits_gets_them_to_the_bit(loss: Loss) -> None:
    plain, _ = trained(loss, chunked=False)
    chunked, _ = trained(loss, chunked=True)
    assert all(map(torch.equal, chunked, plain))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_as_it_was_where_each_operator_was_called(inside: bool) -> None:
    def loss(model: Model, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
            assert logits.dtype == torch.bfloat16
            if inside:
                return F.cross_entropy(logits.view(-1, CLASSES), tokens.flatten())
        return F.cross_entropy(logits.view(-1, CLASSES), tokens.flatten())

    found = []
    for chunked in (False, True):
        torch.manual_seed(7)
        model = Model()
        tokens = torch.randint(CLASSES, (BATCH, LENGTH))
        with in_effect(chunked):
            value = loss(model, tokens)
            value.backward()
        found.append([value.detach(), *(one.grad for one in model.parameters())])
    assert_alike(found[1], found[0], 2e-2)  # type: ignore[arg-type]


def test_a_weight_that_changed_in_between_is_an_error() -> None:
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with ChunkedLoss(PART):
        logits = model(tokens)
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            shifted(logits, tokens)


def test_without_gradients_and_few_rows_logits_are_plain() -> None:
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with ChunkedLoss(PART):
        with torch.no_grad():
            assert type(model(tokens)) is Tensor
        assert type(model(tokens[:1, :ROWS])) is Tensor
        assert type(model(tokens)) is not Tensor
    assert type(model(tokens)) is Tensor


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_head(reentrant: bool) -> None:
    def loss(model: Model, tokens: Tensor) -> Tensor:
        hidden = F.gelu(model.hidden(model.embedding(tokens)))
        return shifted(checkpoint(model.head, hidden, use_reentrant=reentrant), tokens)

    found = []
    for chunked in (False, True):
        torch.manual_seed(7)
        model = Model()
        tokens = torch.randint(CLASSES, (BATCH, LENGTH))
        with in_effect(chunked):
            value = loss(model, tokens)
            value.backward()
        found.append([value.detach(), *(one.grad for one in model.parameters())])
    assert_alike(found[1], found[0])  # type: ignore[arg-type]


def test_what_pytorch_is_not_told_of_is_an_error_not_a_wrong_gradient() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 2

    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with ChunkedLoss(PART):
        logits = model(tokens)
        result: Tensor = Doubled.apply(logits)
        with pytest.raises(RuntimeError, match="gradient would be lost"):
            (result.sum() + model.hidden.weight.sum()).backward()
