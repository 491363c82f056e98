"""Optimizers take the implementation that CUDA parameters would give them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn, optim

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Phase, Role
from tests.capturing.jobs import assumed, operators, record, sizes

WIDTH = 64
PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH)


def training(make: Callable[[Any], optim.Optimizer], *, clip: bool = False) -> Callable[[], None]:
    def job() -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
        optimizer = make(model.parameters())
        for _ in range(4):
            model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return job


MULTI_TENSOR: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": optim.RMSprop,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
}


@pytest.mark.parametrize("name", MULTI_TENSOR)
def test_the_default_is_multi_tensor(name: str) -> None:
    trace = record(training(MULTI_TENSOR[name]))
    found = operators(trace, Phase.OPTIMIZER)
    assert any(op.startswith("_foreach_") for op in found)
    assert trace.meta.optimizer_steps == 3


def test_multi_tensor_operators_move_their_views_alone() -> None:
    """Gradients in a buffer that all share, as DDP's buckets are."""

    def job() -> None:
        shared = torch.ones(4096, device="cuda")
        torch._foreach_add_([torch.ones(16, device="cuda")], [shared[:16]])

    trace = record(job)
    [row] = [
        row
        for row, name in enumerate(trace.ops.name.tolist())
        if trace.strings[name].startswith("aten._foreach_add_")
    ]
    assert trace.ops.moved_bytes[row] == 3 * 16 * 4


def test_asking_for_a_loop_gives_a_loop() -> None:
    found = operators(record(training(lambda p: optim.AdamW(p, foreach=False))), Phase.OPTIMIZER)
    assert not any(op.startswith("_foreach_") for op in found)
    assert found["addcdiv_"] == 3 * 4


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda p: optim.SGD(p, 0.1, fused=True), "_fused_sgd_"),
        (lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True), "_fused_sgd_"),
        (lambda p: optim.Adagrad(p, fused=True), "_fused_adagrad_"),
        (lambda p: optim.Adam(p, fused=True), "_fused_adam_"),
        (lambda p: optim.AdamW(p, fused=True), "_fused_adamw_"),
    ],
)
def test_fused_steps_ask_for_nothing(make: Callable[[Any], optim.Optimizer], op: str) -> None:
    trace = record(training(make))
    assert operators(trace, Phase.OPTIMIZER)[op] == 3
    assert sizes(trace, Phase.OPTIMIZER, op="_fused") == []


def state_sizes(make: Callable[[Any], optim.Optimizer]) -> list[int]:
    trace = record(training(make), steps=1)
    return sorted(size for size in sizes(trace, Phase.OPTIMIZER, op="zeros") if size < 64)


def test_step_counters_live_where_the_optimizer_keeps_them() -> None:
    """On the host by default, on the device for fused and capturable ones."""
    assert state_sizes(optim.AdamW) == []
    assert state_sizes(lambda p: optim.AdamW(p, fused=True)) == [4] * 4
    assert state_sizes(lambda p: optim.AdamW(p, capturable=True)) == [4] * 4


def test_clipping_is_multi_tensor() -> None:
    found = operators(record(training(optim.AdamW, clip=True)))
    assert found["_foreach_norm"] == 3
    assert found["linalg_vector_norm"] == 3  # of the norms


def test_factored_states() -> None:
    """Adafactor keeps rows and columns of a matrix's second moments, never the matrix."""
    trace = record(training(optim.Adafactor), steps=1)
    kept = sizes(trace, Phase.OPTIMIZER, op="new_zeros")
    assert sorted(kept) == [4 * WIDTH] * 4


def test_transformers_adafactor() -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    assert record(training(adafactor)).meta.optimizer_steps == 3


def test_lbfgs_terminates_and_its_closure_brings_inputs() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDTH).to("cuda")).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    trace = record(job, steps=2)
    assert trace.meta.optimizer_steps == 2
    assert Role.INPUT in trace.storages.role


def test_a_second_optimizer_may_ask_in_each_of_its_steps() -> None:
    """Adam, then L-BFGS: what is asked in one step is bounded, not what is asked in all."""

    class Asking(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            asked = self.param_groups[0]["params"][0].grad.sum()
            for _ in range(3_000):
                asked.item()
            super().step(closure)

    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        for make, steps in ((optim.Adam, 1), (Asking, 8)):
            optimizer = make(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
                optimizer.step()

    assert record(job).meta.optimizer_steps > 0


def test_an_optimizer_made_before_the_model_moves() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = optim.AdamW(model.parameters())
        model.cuda()
        model(torch.randn(8, WIDTH, device="cuda")).mean().backward()
        optimizer.step()

    trace = record(job, steps=1)
    assert sum(sizes(trace, Phase.OPTIMIZER, op="zeros_like")) == 2 * PARAMETERS


def test_optimizer_state_loaded_from_another() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        first, second = optim.AdamW(model.parameters()), optim.AdamW(model.parameters())
        for optimizer in (first, second):
            model(torch.randn(8, WIDTH, device="cuda")).mean().backward()
            optimizer.step()
            second.load_state_dict(first.state_dict())

    trace = record(job)
    made = sizes(trace, Phase.OPTIMIZER, op="zeros_like")
    assert sum(made) == 2 * PARAMETERS  # the second found its state


# L-BFGS asks the device how to go on


def minimise(
    device: str, history: int, iterations: int, search: str | None, steps: int
) -> tuple[list[tuple[int, int]], int]:
    """(directions kept, evaluations) after each step, and the number of parameters."""
    torch.manual_seed(0)
    model = nn.Linear(100, 50).to(device)
    inputs, targets = torch.randn(200, 100).to(device), torch.randn(200, 50).to(device)
    rate = 0.1 if search is None else 1.0
    optimizer = optim.LBFGS(
        model.parameters(), rate, iterations, history_size=history, line_search_fn=search
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    seen = []
    for _ in range(steps):
        optimizer.step(closure)
        state = optimizer.state[next(iter(optimizer.state))]
        seen.append((len(state["old_dirs"]), state["func_evals"]))
    return seen, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("history", "iterations"), [(5, 4), (100, 20)])
def test_the_history_of_lbfgs_grows_as_in_a_real_run(history: int, iterations: int) -> None:
    """Compared while the real run has not converged."""
    captured: list[tuple[int, int]] = []
    real, count = minimise("cpu", history, iterations, None, 3)

    def job() -> None:
        captured.extend(minimise("cuda", history, iterations, None, 3)[0])
        minimise("cuda", history, iterations, None, 3)

    trace = record(job, steps=4)
    assert captured == real
    kept = [
        event.bytes
        for event in trace
        if event.kind == EventKind.ALLOC
        and trace.storages.role[event.storage] == Role.OPTIMIZER_STATE
        and event.bytes == 4 * count
    ]
    assert len(kept) >= 2 * real[-1][0]
    assert any("history_size" in text for text in assumed(trace))


def test_the_line_search_of_lbfgs_begins_as_in_a_real_run() -> None:
    real, _ = minimise("cpu", 5, 4, "strong_wolfe", 1)
    captured: list[tuple[int, int]] = []
    record(lambda: captured.extend(minimise("cuda", 5, 4, "strong_wolfe", 1)[0]), steps=2)
    assert captured == real


def test_a_long_history_is_seen_to_its_end() -> None:
    """It takes more steps than others are given."""
    trace = record(lambda: minimise("cuda", 21, 1, None, 50) and None)
    assert trace.meta.optimizer_steps == 24
    assert "same memory as the step before" in trace.meta.stop_reason


def test_a_closure_is_the_model_and_not_the_optimizer() -> None:
    trace = record(lambda: minimise("cuda", 5, 4, None, 2) and None)
    assert operators(trace, Phase.FORWARD)["addmm"] == 8
    assert operators(trace, Phase.OPTIMIZER)["addmm"] == 0


def test_gradients_of_a_closure_are_known_in_the_last_step_too() -> None:
    trace = record(lambda: minimise("cuda", 5, 1, None, 2) and None, steps=2)
    step = trace.events.step[trace.events.kind == EventKind.ALLOC]
    made = trace.events.storage[trace.events.kind == EventKind.ALLOC]
    gradients = trace.storages.role[made] == Role.GRADIENT
    assert [int(gradients[step == one].sum()) for one in range(2)] == [2, 2]


@pytest.mark.parametrize("state_first", [False, True])
def test_a_step_before_any_backward_is_no_training_step(state_first: bool) -> None:
    """Some make the state so, which a checkpoint is then loaded into."""
    session = CaptureSession(CaptureOptions(profile=find_profile("rtx4090")))
    passes = 0
    with suppress(EnoughSeen), session:
        model = nn.Linear(256, 256, device="cuda")
        optimizer = optim.Adam(model.parameters())
        if state_first:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(8):
            model(torch.randn(8, 256, device="cuda")).sum().backward()
            passes += 1
            optimizer.step()
            optimizer.zero_grad()
    assert session.steps.completed == passes == 3


def test_the_next_optimizer_counts_once_the_first_steps_no_more() -> None:
    """A small part was trained beforehand; then the loop that takes hours."""
    rounds = 0

    def job() -> None:
        nonlocal rounds
        beforehand = nn.Linear(4, 4)
        small = optim.SGD(beforehand.parameters(), 0.1)
        beforehand(torch.randn(2, 4)).sum().backward()
        small.step()
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = optim.Adam(model.parameters())
        for rounds in range(1000):  # noqa: B007
            model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    assert rounds < 25
    assert trace.meta.optimizer_steps < 8
    assert not any("ended by itself" in note for note in trace.meta.notes)
