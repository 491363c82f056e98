"""Intervals of mixtures of experts hold routings that are not even."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from memplan.estimation import estimate
from memplan.estimation.choices import uneven
from memplan.types.device import find_profile
from memplan.types.estimate import Estimate
from memplan.types.trace import Trace
from tests.capturing.jobs import record

WIDE, TOKENS, EXPERTS = 1024, 16_384, 8


class Mixture(nn.Module):
    """Each expert gets the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDE, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = self.rows(chosen, number)
            made = torch.tanh(expert(x[row])) * scores[row, place, None]
            out = out.index_add(0, row, made)
        return out

    def rows(self, chosen: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, place = torch.where(chosen == number)
        return row, place


class OnTheHost(Mixture):
    """The host reads how many tokens each expert gets."""

    def rows(self, chosen: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = int((chosen == number).sum().cpu())
        order = (chosen != number).flatten().argsort(stable=True)[:count]
        return order // 2, order % 2


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDE, EXPERTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.weight(x).softmax(-1)
        most, chosen = torch.topk(scores, 2, -1)
        return most, chosen


class Apart(Mixture):
    """The router is a module by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = self.rows(chosen, number)
            out = out.index_add(0, row, torch.tanh(expert(x[row])) * scores[row, place, None])
        return out


class Proposals(nn.Module):
    """A fixed number of the best is kept, whichever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDE, 1)
        self.head = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.score(x).flatten()[:4096].topk(512).indices
        return torch.tanh(self.head(x[best]))


def training(block: type[nn.Module]) -> Trace:
    def job() -> None:
        model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Sequential(block())).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(TOKENS, WIDE, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return record(job)


def spread(found: Estimate) -> int:
    return found.allocated_high_bytes - found.allocated_low_bytes


@pytest.mark.parametrize("block", [Mixture, OnTheHost, Apart])
def test_experts_may_get_more_or_less(block: type[nn.Module]) -> None:
    trace = training(block)
    found = estimate(trace, profile=find_profile("h100"))
    narrow = estimate(without_choices(trace), profile=find_profile("h100"))
    assert found.allocated_peak_bytes == narrow.allocated_peak_bytes
    kept = 2 * TOKENS * WIDE * 4  # of the rows' input alone, an even share
    assert spread(found) - spread(narrow) > kept
    assert any("how choices fall in Sequential.1.0 (" in note for note in found.notes)
    fewer, more = uneven(trace)
    assert fewer.events.bytes.sum() < trace.events.bytes.sum() < more.events.bytes.sum()


def test_choices_that_decide_no_size() -> None:
    trace = training(Proposals)
    assert any(item.kind == "routing" for item in trace.meta.assumptions)
    assert not list(uneven(trace))


def without_choices(trace: Trace) -> Trace:
    """The same trace, without the assumption."""
    kept = [item for item in trace.meta.assumptions if item.kind != "routing"]
    return replace(trace, meta=msgspec.structs.replace(trace.meta, assumptions=kept))
