"""Levers on what is alive while an optimizer steps: which jobs get them, and what they save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.fit.optimizer_in_backward import with_optimizer_in_backward
from memplan.fit.search import Search
from memplan.fit.state import Job, State, first_state
from memplan.fit.updates import with_smaller_updates
from memplan.phases.optimizer_in_backward import peak_of_update
from memplan.runtime.in_effect import plan_in_effect
from memplan.runtime.optimizer_in_backward import preconditions, updates
from memplan.types.device import find_profile
from memplan.types.plan import Plan
from memplan.worker.captures import Captured
from tests.capturing.distributed.ranks import capture as capture_rank
from tests.capturing.distributed.ranks import join
from tests.fit.chain_job import capturing

MIB = 1 << 20
LAYERS, WIDTH = 8, 2048
WEIGHTS = LAYERS * WIDTH**2 * 4
"""Bytes: of 16 Mi elements, which is a bucket, there are two."""
PROGRAM = ScriptTarget("script", "train.py")
A100 = find_profile("a100-80gb")


@pytest.fixture(autouse=True)
def other_tests_are_no_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a job are searched for code that reads gradients, and it may have compiled."""
    monkeypatch.setattr(updates, "reads_gradients", lambda: "")
    monkeypatch.setattr(preconditions, "has_compiled", lambda: False)


def job(wrap: Callable[[Any], Any], *, clips: bool = True, **options: Any) -> Callable[[], None]:
    def train() -> None:
        join()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = wrap(nn.Sequential(*layers).cuda())
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(4):
            model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return train


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cuda", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state(train: Callable[[], None], nbytes: int) -> State:
    """The job on a card of so many bytes beside the context."""
    card = msgspec.structs.replace(A100, total_memory_bytes=nbytes + A100.context_high_bytes)

    @capturing
    def capture(_program: ScriptTarget, plan: Plan | None) -> Captured:
        said: dict[str, str] = {}
        found: list[Any] = []

        def note(part: str, text: str) -> None:
            said[part] = text

        def planned() -> None:
            with plan_in_effect(plan or Plan(), [PROGRAM.name], note, found.append):
                train()

        trace = capture_rank(planned)
        clip_value = next((one for one in found if isinstance(one, float)), 0.0)
        meta = msgspec.structs.replace(trace.meta, unmet=said, clip_value=clip_value)
        trace = replace(trace, meta=meta)
        return Captured(trace, estimate(trace, card))

    return first_state(Job(PROGRAM, card, capture, Search()), capture(PROGRAM))


def saved(found: State) -> dict[str, float]:
    """By kind of lever, in times the bytes of the weights."""
    return {lever.kind: lever.saved_bytes / WEIGHTS for lever in found.levers}


def test_an_update_that_fills_the_card_is_made_in_buckets() -> None:
    """Weights, gradients and moments, and temporaries: of all weights, then of half of them."""
    before = state(job(lambda model: model), 5 * WEIGHTS)
    assert peak_of_update(before.captured.trace)[0] == pytest.approx(5 * WEIGHTS, rel=0.05)
    found = with_smaller_updates(before)
    assert saved(found) == {"step": pytest.approx(0.5, abs=0.01)}
    assert found.added_seconds == 0 and found.plan.step is not None


def test_an_update_with_room_is_left_alone() -> None:
    before = state(job(lambda model: model), 6 * WEIGHTS)
    assert with_smaller_updates(before) is before
    assert before.job.search.captures == 0


def test_an_update_without_temporaries_is_left_alone() -> None:
    before = state(job(lambda model: model, fused=True), 4 * WEIGHTS)
    assert with_smaller_updates(before) is before


def test_what_cannot_have_buckets_is_said() -> None:
    rate = torch.tensor(1e-3)
    train = job(lambda model: model, capturable=True, lr=rate)
    found = with_smaller_updates(state(train, 5 * WEIGHTS))
    assert not found.levers and "hyperparameter" in found.notes[0]


def test_gradients_lie_in_the_buckets_of_ddp() -> None:
    before = state(job(DistributedDataParallel), 5 * WEIGHTS)
    found = with_smaller_updates(before)
    assert saved(found) == {
        "grad_views": pytest.approx(1, abs=0.01),
        "step": pytest.approx(0.5, abs=0.01),
    }
    assert peak_of_update(found.captured.trace)[0] == pytest.approx(4.5 * WEIGHTS, rel=0.05)


def test_gradients_that_lie_there_already() -> None:
    def wrap(model: Any) -> Any:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    found = with_smaller_updates(state(job(wrap), 4 * WEIGHTS))
    assert list(saved(found)) == ["step"]
    assert any("views already" in note for note in found.notes)


def test_fsdp_has_the_optimizer_in_backward() -> None:
    """Of half of the weights each: no gradients, and no temporaries but of one weight."""
    found = with_optimizer_in_backward(state(job(sharded, clips=False), WEIGHTS))
    assert list(saved(found)) == ["order"] and found.plan.order is not None
    assert found.plan.order.from_first
    assert with_smaller_updates(found).plan.step is None


def test_gradients_clipped_by_value_are_clipped_before_their_update() -> None:
    """The value is what the capture has seen."""

    def train() -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()

    found = with_optimizer_in_backward(state(train, WEIGHTS))
    assert list(saved(found)) == ["order"] and found.plan.order is not None
    assert found.plan.order.clips and found.plan.order.clip_value == 0.25


def test_ddp_has_not() -> None:
    found = with_optimizer_in_backward(state(job(DistributedDataParallel, clips=False), WEIGHTS))
    assert not found.levers and "sums gradients over ranks" in found.notes[0]
