"""What optimizer state on the host adds to a step: the time that nothing runs beside its copies."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.fit.host_state import (
    among_other_copies,
    cheaper_share,
    is_quick,
    least_seconds,
    with_less_state,
    with_state_on_host,
)
from memplan.fit.plans import Planner
from memplan.fit.search import Search
from memplan.fit.state import Job, State, first_state
from memplan.runtime.in_effect import plan_in_effect
from memplan.runtime.optimizer_in_backward import preconditions, updates
from memplan.types.device import find_profile
from memplan.types.plan import OrderPart, Plan
from memplan.worker.captures import Captured
from tests.capturing.jobs import record
from tests.fit.chain_job import Greedy, capturing

LAYERS, WIDTH = 8, 2048
CARD = find_profile("a100-80gb")


def train() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.ones(2048, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def other_tests_are_no_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a job are searched for code that reads gradients, and it may have compiled."""
    monkeypatch.setattr(updates, "reads_gradients", lambda: "")
    monkeypatch.setattr(preconditions, "has_compiled", lambda: False)


@pytest.fixture(scope="module")
def plain() -> State:
    @capturing
    def capture(_program: ScriptTarget, plan: Plan | None) -> Captured:
        def planned() -> None:
            with plan_in_effect(plan or Plan(), ["train.py"], lambda *_told: None):
                train()

        trace = record(planned)
        return Captured(trace, estimate(trace, CARD))

    program = ScriptTarget("script", "train.py")
    return first_state(Job(program, CARD, capture, Search()), capture(program))


def waits(state: State) -> float:
    """The time that the lever adds, as a share of that of all copies in one direction."""
    [lever] = [one for one in state.levers if one.kind == "state"]
    part = state.plan.state
    assert part is not None and part.added_seconds == lever.added_seconds
    assert part.host_bytes == 2 * LAYERS * WIDTH**2 * 4
    return part.added_seconds * CARD.host_link_bytes_per_second / part.host_bytes


def in_its_own_step(state: State) -> State:
    """The same job, as one that cannot have updates in the backward pass."""
    return replace(state, job=replace(state.job, search=Search(fails={"order"})))


def test_copies_beside_the_backward_pass_add_little(plain: State) -> None:
    """In backward, of eight weights the last one's update alone comes when nothing is left to run;
    without that, all updates do."""
    order = OrderPart(parameters=LAYERS, gradient_bytes=LAYERS * WIDTH**2 * 4, from_first=True)
    base = plain.trying(order=order)
    plain_steps = in_its_own_step(plain)
    late, early = with_state_on_host(plain_steps, 1.0), with_state_on_host(base, 1.0)
    assert 0.5 < waits(late) < 1.1
    assert waits(early) < 0.4
    assert least_seconds(base) < least_seconds(plain_steps) <= late.levers[-1].added_seconds
    assert is_quick(base) and not is_quick(plain_steps)


def test_state_that_moves_has_updates_in_the_backward_pass_wherever_it_can(plain: State) -> None:
    found = with_state_on_host(plain, 1.0)
    assert [lever.kind for lever in found.levers] == ["order", "state"]
    assert found.plan.order is not None and found.plan.order.from_first
    assert waits(found) < 0.4 and is_quick(plain)
    assert least_seconds(plain) <= found.added_seconds
    late = with_state_on_host(in_its_own_step(plain), 1.0)
    assert [lever.kind for lever in late.levers] == ["state"] and late.plan.order is None


def test_beside_other_copies_in_the_backward_pass_all_count(plain: State) -> None:
    order = OrderPart(parameters=LAYERS, gradient_bytes=LAYERS * WIDTH**2 * 4, from_first=True)
    early = with_state_on_host(plain.trying(order=order), 1.0)
    assert waits(among_other_copies(early)) == pytest.approx(1.0)
    late = with_state_on_host(
        in_its_own_step(plain), 1.0
    )  # after the backward pass: no other copies are left
    assert among_other_copies(late) is late


def on_a_card(state: State, nbytes: int) -> State:
    card = msgspec.structs.replace(CARD, total_memory_bytes=nbytes)
    return replace(state, job=replace(state.job, profile=card))


def test_less_of_it_where_the_card_has_room(plain: State) -> None:
    full = with_state_on_host(in_its_own_step(plain), share=1.0)
    assert full.plan.state is not None
    total, needed = full.plan.state.host_bytes, on_a_card(full, 2 << 30).needed
    roomy = on_a_card(full, needed + total // 2)
    less = with_less_state(roomy)
    part = less.plan.state
    assert part is not None and 0.5 < part.share < 0.65
    # Of whole parameters.
    assert part.host_bytes == pytest.approx(part.share * total, abs=total / LAYERS)
    [lever] = less.levers
    assert lever.added_seconds == part.added_seconds < 0.8 * full.added_seconds
    assert less.needed <= needed + total // 2

    tight = on_a_card(full, needed + total // 10)
    assert with_less_state(tight) is tight


def test_no_other_share_where_nothing_was_captured_with_recomputation(plain: State) -> None:
    """As in a job whose compiled graphs are all that there is to recompute."""
    base = with_state_on_host(plain, 1.0)
    assert cheaper_share(plain, base, Planner(base, Greedy()), 10.0, 0.0) is None
