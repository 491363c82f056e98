"""Frozen weights whose copies come as late as the events allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplan.runtime import streams
from tests.runtime import test_frozen
from tests.runtime.test_frozen import applied, made, same, train
from tests.runtime.test_offload_streams import Stream, late

__all__ = ["late", "small_weights"]

small_weights = test_frozen.small_weights


@pytest.mark.parametrize("name", test_frozen.MODELS)
@pytest.mark.parametrize("ahead", [0, 3000, 1 << 20])
def test_every_copy_is_waited_for(name: str, ahead: int, late: list[Stream]) -> None:
    plain = train(made(name))
    with applied(ahead=ahead) as _:
        assert same(train(made(name)), plain)
    assert any(stream.done for stream in late)


def test_a_wait_less_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(made("adapted"))
    wait = streams.wait

    def wait_less(stream: Any, event: Any) -> None:
        if stream.late:
            wait(stream, event)

    monkeypatch.setattr(streams, "wait", wait_less)
    with applied() as (_, said):
        assert not same(train(made("adapted")), plain) or said


def test_a_sparse_parameter_stays() -> None:
    plain, model = made("adapted"), made("adapted")
    expected = train(plain)
    model.register_parameter("rare", nn.Parameter(torch.eye(40).to_sparse(), requires_grad=False))
    with applied() as (lever, _):
        assert same(train(model)[: len(expected) // 2], expected[: len(expected) // 2])
        assert len(list(lever.weights())) == 4
