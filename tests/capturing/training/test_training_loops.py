"""What training loops do besides forward, backward and step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Phase, Role
from tests.capturing.jobs import allocations, bytes_of, frees, operators, peak, record, sizes

WIDTH = 64
BATCH = 32
WEIGHT = 4 * WIDTH * WIDTH


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False).cuda()


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, device="cuda")


# Mixed precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_a_weight_once_until_the_region_ends(dtype: torch.dtype) -> None:
    def job() -> None:
        model = linear()
        with torch.no_grad(), torch.autocast("cuda", dtype):
            model(model(batch()))
        torch.empty(7, device="cuda")

    trace = record(job)
    casts = [event for event in allocations(trace, op="_to_copy") if event.bytes == WEIGHT // 2]
    assert len(casts) == 1
    after = allocations(trace, op="empty")[-1]
    products = allocations(trace, op="mm")
    assert products[-1].index < frees(trace)[casts[0].storage] < after.index


def test_autocast_without_its_cache_casts_each_time() -> None:
    def job() -> None:
        model = linear()
        with torch.no_grad(), torch.autocast("cuda", torch.float16, cache_enabled=False):
            model(model(batch()))

    assert sizes(record(job), op="_to_copy").count(WEIGHT // 2) == 2


def test_the_old_autocast_is_the_same() -> None:
    def job() -> None:
        with torch.no_grad(), torch.cuda.amp.autocast():
            linear()(batch())

    assert sizes(record(job), op="_to_copy").count(WEIGHT // 2) == 1


def test_grad_scaler_never_skips_a_step() -> None:
    scales = []

    def job() -> None:
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(4):
            with torch.autocast("cuda", torch.float16):
                loss = model(batch()).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())

    trace = record(job, steps=4)
    assert trace.meta.optimizer_steps == 4
    assert bytes_of(trace, Role.OPTIMIZER_STATE) == 2 * WEIGHT
    assert set(scales) == {65536.0}


# Copies of the weights


def test_an_ema_copy_costs_one_model() -> None:
    def job() -> None:
        model = linear()
        average = copy.deepcopy(model)
        with torch.no_grad():
            for mean, current in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(current, 0.01)

    assert sizes(record(job)) == [WEIGHT, WEIGHT]


def test_averaged_model_is_multi_tensor() -> None:
    def job() -> None:
        model = linear()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        for _ in range(2):
            average.update_parameters(model)

    assert operators(record(job))["_foreach_lerp_"] == 1


def test_load_state_dict_copies_in_place() -> None:
    def job() -> None:
        model, other = linear(), linear()
        model.load_state_dict(other.state_dict())
        model.load_state_dict({"weight": torch.zeros(WIDTH, WIDTH)})
        model.load_state_dict({"weight": torch.zeros(WIDTH, WIDTH, device="cuda")}, assign=True)

    assert sizes(record(job)) == [WEIGHT, WEIGHT, WEIGHT]


# Evaluation


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_evaluation_inside_the_loop(without_gradients: Callable[[], torch.no_grad]) -> None:
    def job() -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten()).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(2, 3, 8, 8, device="cuda")).mean().backward()
            optimizer.step()
            with without_gradients():
                scores = model(torch.randn(2, 3, 8, 8, device="cuda"))
                assert scores.argmax(1).float().mean().item() >= 0
                assert scores.cpu().numpy().shape == (2, 288)

    trace = record(job, steps=2)
    found = operators(trace, Phase.EVALUATION)
    assert found["convolution"] == 1  # taken apart, also in inference mode
    assert "conv2d" not in found
    assert any(choice.op == "convolution" for choice in trace.meta.kernels)
    assert allocations(trace, Phase.EVALUATION, op="convolution")[0].bytes == 4 * 2 * 8 * 6 * 6


# Checkpointing


def deep(reentrant: bool | None) -> Callable[[], None]:
    def job() -> None:
        def block() -> nn.Module:
            layers = [linear(), nn.Dropout(0.1), nn.GELU(), linear(), nn.GELU()]
            return nn.Sequential(*layers)

        blocks = nn.ModuleList(block() for _ in range(4))
        optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
        for _ in range(2):
            x = torch.randn(1024, WIDTH, device="cuda", requires_grad=True)
            for one in blocks:
                x = one(x) if reentrant is None else checkpoint(one, x, use_reentrant=reentrant)
            x.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return job


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_in_the_backward_pass(reentrant: bool) -> None:
    plain, saved = record(deep(None), steps=2), record(deep(reentrant), steps=2)
    assert operators(plain, Phase.BACKWARD)["gelu"] == 0
    recomputed = operators(saved, Phase.BACKWARD)
    assert recomputed["gelu"] >= 2 * 4
    assert recomputed["native_dropout"] == 2 * 4
    activation = 4 * 1024 * WIDTH
    most = peak(plain)[0] - peak(saved)[0]
    assert 6 * activation < most < 16 * activation


def test_checkpointing_under_autocast() -> None:
    def job() -> None:
        model = nn.Sequential(linear(), nn.GELU())
        with torch.autocast("cuda", torch.bfloat16):
            y = checkpoint(model, batch(), use_reentrant=False)
        y.float().mean().backward()

    assert BATCH * WIDTH * 2 in sizes(record(job), Phase.BACKWARD, op="mm")


# Data


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_from_a_real_loader(workers: int) -> None:
    data = TensorDataset(torch.randn(24, WIDTH), torch.arange(24) % 10)
    labels = []

    def job() -> None:
        model = nn.Linear(WIDTH, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in DataLoader(data, 8, num_workers=workers, pin_memory=True):
            assert not isinstance(x, torch.nn.Parameter)
            target = y.to("cuda", non_blocking=True)
            labels.extend(target.tolist())
            logits = model(x.to("cuda", non_blocking=True))
            nn.functional.cross_entropy(logits, target).backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job, steps=3)
    assert labels == [number % 10 for number in range(24)]
    inputs = [event for event in allocations(trace) if trace.storages.role[event.storage] == 6]
    assert sorted({event.bytes for event in inputs}) == [8 * 8, 8 * WIDTH * 4]


def test_a_script_that_saves_and_loads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import torch
model = torch.nn.Linear({WIDTH}, {WIDTH}, bias=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(8, {WIDTH}, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, "last.pt")
    state = torch.load("last.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(model.weight)
"""
    )
    options = CaptureOptions(profile=find_profile("a100-80gb"), steps=3)
    trace = capture_script(ScriptTarget("script", str(script)), options)
    assert trace.meta.optimizer_steps == 3
    assert not Path("last.pt").exists()
    assert sizes(trace, Phase.OPTIMIZER, op="zeros_like") == [WEIGHT, WEIGHT]


# Autograd


def test_hooks_and_retained_graphs() -> None:
    seen: list[str] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append("hook")
        return gradient * 2

    def job() -> None:
        x = batch().requires_grad_()
        y = x.exp()
        y.register_hook(hook)
        loss = y.sum()
        loss.backward(retain_graph=True)
        loss.backward()
        weight = nn.Parameter(batch())
        weight.register_post_accumulate_grad_hook(lambda _weight: seen.append("accumulated"))
        weight.sum().backward()

    record(job)
    assert seen == ["hook", "hook", "accumulated"]


def test_a_custom_function_keeps_what_it_saves() -> None:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(
            ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
        ) -> torch.Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return gradient * x.exp()

    def job() -> None:
        weight = nn.Parameter(batch())
        y = Exponential.apply(weight * 2)
        torch.empty(7, device="cuda")
        y.sum().backward()

    trace = record(job)
    saved = allocations(trace, op="mul")[0]
    marker = allocations(trace, op="empty.")[0]
    assert frees(trace)[saved.storage] > marker.index


def test_a_gradient_of_a_gradient_adds_out_of_place() -> None:
    """With `create_graph` the engine may not reuse a gradient: every addition is a request."""

    def job(create_graph: bool) -> None:
        x = batch().requires_grad_()
        h = x * 2
        y = sum((h * float(i) for i in range(2, 6)), start=h.sin())
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        gradient.sum()

    def additions(create_graph: bool) -> int:
        return len(sizes(record(lambda: job(create_graph)), Phase.BACKWARD, op="add."))

    assert additions(False) == 0
    assert additions(True) == 4


def test_events_never_free_what_is_not_alive() -> None:
    trace = record(deep(False), steps=2)
    alive: set[int] = set()
    for event in trace:
        if event.kind == EventKind.ALLOC:
            assert event.storage not in alive
            alive.add(event.storage)
        elif event.kind == EventKind.FREE:
            alive.remove(event.storage)


def test_steps_repeat_whatever_the_order_in_which_they_let_go() -> None:
    def job() -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters())
        draw = random.Random(1)
        for _ in range(50):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            held = [torch.empty(size, device="cuda") for size in (1000, 2000, 3000, 4000)]
            while held:
                held.pop(draw.randrange(len(held)))

    assert record(job).meta.optimizer_steps == 3
