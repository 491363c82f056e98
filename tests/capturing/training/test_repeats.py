"""Forwards without gradients that repeat are not all run, and nothing else is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from memplan.simulate import simulate
from memplan.types.trace import Phase, Role, Trace
from tests.capturing.jobs import operators, record
from tests.capturing.training.scripts import run

WIDTH, ROWS, CALLS = 64, 256, 60
OUTPUT = 4 * ROWS * WIDTH

Body = Callable[[nn.Module, torch.Tensor], object]


class Block(nn.Module):
    """Two layers, and what the tests' own kinds of it do something with besides."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0
        self.kept: list[torch.Tensor] = []
        self.register_buffer("cache", torch.zeros(1 << 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x).relu())
        return made


def train(model: nn.Module, steps: int = 100) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(steps):
        model(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated(
    body: Body, *, model: type[nn.Module] = Block, steps: int | None = None, calls: int = CALLS
) -> Trace:
    """The trace of so many evaluations, and a training behind them."""

    def job() -> None:
        block = model().cuda()
        with torch.no_grad():
            for _ in range(calls):
                body(block, torch.randn(ROWS, WIDTH, device="cuda"))
        train(Block().cuda())

    return record(job, steps=steps)


def runs(trace: Trace) -> int:
    """Calls of `Block.first` that were run in evaluations."""
    return operators(trace, Phase.EVALUATION)["addmm"] // 2


def answered(trace: Trace) -> int:
    return operators(trace)["repeated_forward"]


def test_an_evaluation_is_not_run_in_full() -> None:
    trace = evaluated(lambda model, x: model(x))
    assert runs(trace) + answered(trace) == CALLS
    # The first, which takes the library's workspace, four alike, and after 1, 2, 4, 8 and 16 more.
    assert runs(trace) == 1 + 4 + 5
    (note,) = [text for text in trace.meta.notes if "without gradients" in text]
    assert note.startswith(f"{CALLS - 10} of {CALLS} forwards of Block")
    whole = evaluated(lambda model, x: model(x), steps=3)
    assert runs(whole) == CALLS and not answered(whole)
    assert simulate(trace).reserved_peak_bytes == simulate(whole).reserved_peak_bytes
    assert simulate(trace).requested_peak_bytes == simulate(whole).requested_peak_bytes


def test_training_steps_are_run_in_full() -> None:
    """A teacher's forwards are a part of the step that is compared, planned and timed."""

    def job() -> None:
        model, teacher = Block().cuda(), Block().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(100):
            with torch.no_grad():
                for _ in range(20):
                    teacher(torch.randn(ROWS, WIDTH, device="cuda"))
            model(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    assert trace.meta.optimizer_steps == 3
    rows = (trace.ops.phase == Phase.EVALUATION) & (trace.ops.step == 2)
    names = [trace.strings[name] for name in trace.ops.name[rows]]
    assert names.count("aten.addmm.default") == 2 * 20


def evaluated_between_steps(steps: int | None) -> Trace:
    def job() -> None:
        model = Block().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(100):
            if number == 1:
                with torch.no_grad():
                    for _ in range(200):
                        model(torch.randn(2 * ROWS, WIDTH, device="cuda"))
            model(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return record(job, steps=steps)


def test_an_evaluation_between_steps_is_not_run_in_full() -> None:
    """As nanoGPT's every so many iterations; what it computes is counted all the same."""
    trace, whole = evaluated_between_steps(None), evaluated_between_steps(4)
    assert runs(whole) == 200 and not answered(whole)
    assert runs(trace) + answered(trace) == 200
    assert runs(trace) < 50
    for mine, theirs in zip(_evaluation(trace), _evaluation(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=0.02)
    assert simulate(trace).reserved_peak_bytes == simulate(whole).reserved_peak_bytes


def _evaluation(trace: Trace) -> tuple[int, int]:
    """Operations, and bytes moved, without gradients."""
    rows = trace.ops.phase == Phase.EVALUATION
    return int(trace.ops.flops[rows].sum()), int(trace.ops.moved_bytes[rows].sum())


class Outputs(NamedTuple):
    logits: torch.Tensor
    others: dict[str, torch.Tensor | None]


class Structured(Block):
    def forward(self, x: torch.Tensor) -> Outputs:  # type: ignore[override]
        made = super().forward(x)
        flat = torch.randn(2 * ROWS * WIDTH + 64, device="cuda")
        part = flat[64:].view(2, ROWS, WIDTH)
        return Outputs(made.t(), {"first": part[0], "second": part[1], "none": None})


def test_outputs_have_the_structure_and_geometry_of_those_before() -> None:
    seen = set()

    def look(model: nn.Module, x: torch.Tensor) -> None:
        made = model(x)
        assert isinstance(made, Outputs) and made.others["none"] is None
        parts = made.logits, made.others["first"], made.others["second"]
        tensors = [part for part in parts if part is not None]
        assert tensors[1].untyped_storage()._cdata == tensors[2].untyped_storage()._cdata
        seen.add(
            tuple(
                (t.dtype, t.device, t.size(), t.stride(), t.storage_offset(), t.requires_grad)
                for t in tensors
            )
        )
        assert tensors[1].sum().cpu().shape == ()

    def job() -> None:
        block = Structured().cuda()
        with torch.no_grad():
            for _ in range(CALLS):
                look(block, torch.randn(ROWS, WIDTH, device="cuda"))
        train(Block().cuda())

    trace = record(job)
    assert answered(trace) > CALLS // 2
    assert len(seen) == 1


@pytest.mark.parametrize("region", ["call", "loop"])
def test_weights_that_autocast_keeps_for_its_region(region: str) -> None:
    """They are gone before the next call, or there before it."""

    def job() -> None:
        block = Block().cuda()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=region == "loop"):
            for _ in range(CALLS):
                with torch.autocast("cuda", torch.bfloat16):
                    made = block(torch.randn(ROWS, WIDTH, device="cuda"))
                assert made.dtype == torch.bfloat16
        train(block)

    assert answered(record(job)) > CALLS // 2


# What a call does besides, or what it hangs on: all are run.


def grows(model: Block, x: torch.Tensor) -> None:
    model.kept.append(model(x))


class Caching(Block):
    """Keeps what it has seen, as a cache of keys and values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        self.kept = [torch.cat([*self.kept, made])]
        return self.kept[0]


class Writing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(1)
        return super().forward(x)


class Counting(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x.repeat(16, 1)) if self.calls == CALLS else super().forward(x)


class Looking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.repeat(2, 1)) if x.mean() > 0 else super().forward(x)


class Synchronizing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return super().forward(x)


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda _module, _args, made: made + 1)


KEPT: list[torch.Tensor] = []


class Elsewhere(Block):
    """Leaves the last result where no attribute shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        KEPT[:] = [made * 2]
        return made


@pytest.mark.parametrize(
    "model", [Caching, Writing, Counting, Looking, Synchronizing, Hooked, Elsewhere]
)
def test_a_call_that_does_more_than_make_its_outputs_is_run(model: type[Block]) -> None:
    trace = evaluated(lambda block, x: block(x), model=model, calls=20)
    KEPT.clear()
    assert runs(trace) == 20 and not answered(trace)


@pytest.mark.parametrize(
    "body",
    [
        grows,
        lambda model, x: model.train(not model.training)(x),
        lambda model, x: model(x.requires_grad_()),
    ],
)
def test_calls_that_are_not_alike_are_run_or_told_apart(body: Body) -> None:
    trace = evaluated(body, calls=20, steps=None)
    whole = evaluated(body, calls=20, steps=3)
    assert simulate(trace).reserved_peak_bytes == simulate(whole).reserved_peak_bytes
    if body is grows:
        assert runs(trace) == 20


def test_a_batch_that_is_larger_is_run_and_counts() -> None:
    count = 0

    def body(model: nn.Module, x: torch.Tensor) -> None:
        nonlocal count
        count += 1
        model(x.repeat(32, 1) if count == CALLS - 3 else x)

    trace = evaluated(body)
    assert 32 * OUTPUT * 4 in trace.events.bytes


def test_memory_that_another_part_of_the_loop_keeps_is_counted() -> None:
    """The calls are like each other, but the last of them begins with more alive."""
    count, held = 0, []

    def body(model: nn.Module, x: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count > 40:
            held.append(torch.empty(1 << 20, device="cuda"))
        model(x)

    trace = evaluated(body)
    held.clear()
    count = 0
    whole = evaluated(body, steps=3)
    assert simulate(trace).reserved_peak_bytes == simulate(whole).reserved_peak_bytes


def test_a_sampler_behind_the_training(tmp_path: Path) -> None:
    """As diffusers' examples sample after an epoch: the loop runs, the network hardly ever."""
    from memplan.capturing.options import CaptureOptions, ScriptTarget
    from memplan.capturing.script import capture_script
    from memplan.types.device import find_profile

    script = tmp_path / "train.py"
    script.write_text("""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(),
                                    nn.Conv2d(32, 3, 3, padding=1))
        self.time = nn.Linear(16, 32)
    def forward(self, sample, timestep):
        if timestep.dim() == 0:
            timestep = timestep[None].to(sample.device)
        angle = timestep[:, None].float() * torch.exp(-torch.arange(8, device=sample.device))
        hidden = self.layers[0](sample)
        hidden = hidden + self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        return {"sample": self.layers[2](self.layers[1](hidden))}

model = Denoiser().cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = DataLoader(TensorDataset(torch.randn(256, 3, 16, 16)), batch_size=8)
for epoch in range(1):
    for (clean,) in data:
        clean = clean.cuda()
        timesteps = torch.randint(0, 1000, (len(clean),), device="cuda")
        loss = (model(clean, timesteps)["sample"] - clean).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        image = torch.randn(64, 3, 16, 16, device="cuda")
        for timestep in torch.arange(999, -1, -1):
            image = image - 0.1 * model(image, timestep)["sample"]
        print(image.clamp(0, 1).cpu().numpy().shape)
""")
    options = CaptureOptions(profile=find_profile("rtx4090"))
    trace = capture_script(ScriptTarget("script", str(script)), options)
    assert operators(trace, Phase.EVALUATION)["convolution"] < 2 * 20
    assert any("of 1000 forwards of Denoiser" in note for note in trace.meta.notes)
    assert trace.events.bytes[trace.events.phase == Phase.EVALUATION].max() >= 64 * 32 * 256 * 4
    assert not (trace.storages.role == Role.WORKSPACE).all()


def test_a_module_is_traced_as_it_is(tmp_path: Path) -> None:
    body = """
traced = torch.jit.trace(model, torch.randn(2, 512).cuda())
for number in range(9):
    traced(torch.randn(4, 512).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert run(tmp_path, body).meta.optimizer_steps == 3
