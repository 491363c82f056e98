"""What is known of large tensors is worked out when somebody asks, and is then what it would be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memplan.capturing.known_values.store import _Call
from tests.capturing.jobs import record

SIDE = 96  # large enough to be put off


def program(seed: int, device: str) -> list[float]:
    """Whole numbers, so that every order of computing gives the same."""
    chance = random.Random(seed)
    data = torch.arange(SIDE * SIDE, dtype=torch.int64).reshape(SIDE, SIDE)
    pool = [data.to(device, copy=True), torch.ones_like(data, device=device)]
    seen: list[float] = []

    def pick() -> torch.Tensor:
        tensor = chance.choice(pool)
        return chance.choice([tensor, tensor.t(), tensor.roll(1)])

    def view() -> torch.Tensor:
        tensor = chance.choice(pool)
        return chance.choice([tensor, tensor[: SIDE // 2], tensor[:, 3], tensor[5, 5:9]])

    steps: list[Callable[[], Any]] = [
        lambda: pool.append(pick() + pick()),
        lambda: pool.append((pick() % 7).clone()),
        lambda: pool.append(torch.where(pick() > pick(), pick(), 3)),
        lambda: pool.append(pick().sort(dim=1)[1]),
        lambda: pool.append(torch.zeros_like(pick())),
        lambda: pool.append(torch.full((SIDE, SIDE), 5, device=device)),
        lambda: pool.append(torch.ones(SIDE, 1, dtype=torch.int64, device=device) * pick()[:1]),
        lambda: view().add_(chance.randrange(9)),
        lambda: view().zero_(),
        lambda: view().fill_(chance.randrange(9)),
        lambda: chance.choice(pool).copy_(pick() % 11),
        lambda: chance.choice(pool).masked_fill_(pick() > 50, 2),
        lambda: data.add_(1),
        lambda: pool.append(data.to(device, copy=True)),
        lambda: seen.append(view().sum().item()),
    ]
    for _ in range(60):
        chance.choice(steps)()
        if len(pool) > 6:
            del pool[chance.randrange(len(pool))]
    return seen + [(tensor % 1000).float().sum().item() for tensor in pool]


@pytest.mark.parametrize("seed", range(12))
def test_values_are_those_of_a_real_run(seed: int) -> None:
    found: list[float] = []
    record(lambda: found.extend(program(seed, "cuda")))
    assert found == program(seed, "cpu")


def test_what_nobody_asks_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = _Call.__call__

    def noted(self: _Call, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.func._opname)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(_Call, "__call__", noted)

    def layers() -> None:
        mask = torch.zeros(SIDE, SIDE, dtype=torch.bool).to("cuda")
        del ran[:]
        for _ in range(20):
            (~mask).float().mul_(2.0).sum()
        assert ran == []
        assert ((~mask).float() * 2.0).sum().item() == 2 * SIDE * SIDE
        assert ran == ["bitwise_not", "_to_copy", "mul", "sum"]

    record(layers)


def test_a_long_chain_does_not_grow() -> None:
    def count() -> None:
        total = torch.zeros(SIDE, SIDE, device="cuda")
        for _ in range(2000):
            total += 1
        assert total.sum().item() == 2000 * SIDE * SIDE

    record(count)
