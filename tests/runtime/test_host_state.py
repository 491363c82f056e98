"""Optimizers' state on the host: the same bits, whatever the optimizer and the loop do.

There is no card here: parameters and state are both on the CPU, and pieces pass through buffers of
their own as they do on a card.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memplan.runtime.host_state.in_effect as in_effect
import memplan.runtime.host_state.ring as ring
from memplan.runtime import host_buffers
from memplan.runtime.host_state import HostState
from memplan.runtime.in_effect import plan_in_effect
from memplan.types.plan import FrozenPart, Plan, StatePart
from memplan.types.trace import Role
from tests.capturing.jobs import bytes_of, record

Make = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, 1e-2, foreach=True),
    "fused": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "sgd": lambda p: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: optim.SGD(p, 1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-2, centered=True, momentum=0.9),
    "adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "nadam": lambda p: optim.NAdam(p, 1e-2),
    "radam": lambda p: optim.RAdam(p, 1e-2),
    "adamax": lambda p: optim.Adamax(p, 1e-2),
    "adadelta": lambda p: optim.Adadelta(p),
    "rprop": lambda p: optim.Rprop(p),
    "asgd": lambda p: optim.ASGD(p),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "ELEMENTS", 2**11)
    monkeypatch.setattr(in_effect, "_SMALLEST", 100)


class Job:
    """A small training; `said` is what the lever said, `passed` the tensors that it streamed."""

    def __init__(self, make: Make, *, share: float = 1.0, plainly: bool = False) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(40, 130), nn.GELU(), nn.Linear(130, 70, bias=False), nn.Linear(70, 2)
        )
        weight = self.model.get_parameter("2.weight")
        weight.data = weight.data.t().contiguous().t()
        self.optimizer = make(self.model.parameters())
        self.said: list[str] = []
        part = StatePart(share=share)
        self.lever = None if plainly else HostState(part, self.said.append, devices=("cpu",))

    def run(self, steps: int = 4, accumulate: int = 1, clip: bool = False) -> Job:
        generator = torch.Generator().manual_seed(5)
        with self.lever or nullcontext():
            for step in range(steps):
                for _ in range(accumulate):
                    batch = torch.randn(8, 40, generator=generator)
                    self.model(batch).square().mean().backward()
                if clip:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.param_groups[0]["lr"] *= 1 / (step + 1)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        return self

    def tensors(self) -> list[Tensor]:
        state = (v for s in self.optimizer.state.values() for v in s.values())
        return [*self.model.parameters(), *(v for v in state if isinstance(v, Tensor))]

    def on_host(self) -> int:
        chosen = self.lever._chosen.get(self.optimizer) if self.lever else None
        return len(chosen) if chosen is not None else 0


def same(one: Job, other: Job) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(name: str) -> None:
    make = OPTIMIZERS[name]
    found = Job(make).run(accumulate=2, clip=True)
    assert same(found, Job(make, plainly=True).run(accumulate=2, clip=True))
    assert not found.said and found.on_host() == 4
    for parameter in found.model.parameters():
        assert parameter.grad is None or parameter.grad.shape == parameter.shape


class Streams:
    """In place of `memplan.runtime.streams`: an event is the number of events before it."""

    def __init__(self) -> None:
        self.events = 0
        self.waited: list[tuple[str, int]] = []

    def new(self, _device: object) -> str:
        return "copies"

    def current(self, _device: object) -> str:
        return "computing"

    def on(self, _stream: str) -> nullcontext[None]:
        return nullcontext()

    def record(self, _stream: str) -> int:
        self.events += 1
        return self.events

    def wait(self, stream: str, event: int) -> None:
        self.waited.append((stream, event))


def test_a_piece_waits_for_what_went_from_its_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small pieces are ahead of the computing, and none lies on another that is in flight."""
    made = Streams()
    monkeypatch.setattr(ring, "streams", made)
    whole = ring.Ring(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 2**11 + 1, (60,), generator=generator).tolist()
    sent: list[tuple[int, int, int]] = []
    for size in [*[100] * 61, *sizes]:
        host = torch.zeros(size)
        before = len(made.waited)

        def use(start: int, stop: int, buffers: list[Tensor]) -> None:
            [buffer] = buffers
            begin = buffer.storage_offset()
            assert stop - start == len(buffer)
            free = {event for stream, event in made.waited if stream == "copies"}
            for other, end, event in sent:
                if other < begin + len(buffer) and begin < end:
                    assert event in free, "its place is still in use"
            buffer.add_(1)

        whole.pass_through([host], use)
        assert host.eq(1).all()
        place, event = whole._going[-1]
        sent.append((place.start, place.stop, event))
        if len(sent) <= 61:  # 61 of these are as large as the ring
            fetched = [e for s, e in made.waited[before:] if s == "copies"]
            assert len(fetched) <= 1 + (len(sent) == 1), "the first round waits for nothing"


def test_a_share_of_the_parameters() -> None:
    make = OPTIMIZERS["adamw"]
    found = Job(make, share=0.4).run()
    assert 0 < found.on_host() < 4
    assert same(found, Job(make, plainly=True).run())


def test_state_that_is_loaded_goes_to_the_host_again() -> None:
    make = OPTIMIZERS["adamw"]
    jobs = [Job(make), Job(make, plainly=True)]
    for job in jobs:
        job.run(2)
        saved = copy.deepcopy(job.optimizer.state_dict())
        job.run(1)
        job.optimizer.load_state_dict(saved)
        job.run(2)
    assert same(*jobs)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: optim.Adafactor(p), "not known to update each parameter by itself"),
        (
            lambda p: optim.AdamW(p, torch.tensor(1e-2)),
            "hyperparameter of the optimizer is a tensor",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_taken_apart_steps_as_ever(make: Make, reason: str) -> None:
    found = Job(make).run()
    assert reason in found.said[0] and len(found.said) == 1 and not found.on_host()
    assert same(found, Job(make, plainly=True).run())


def test_a_closure() -> None:
    job = Job(OPTIMIZERS["adamw"])
    assert job.lever is not None

    def closure() -> float:
        job.optimizer.zero_grad()
        loss = job.model(torch.ones(2, 40)).square().mean()
        loss.backward()
        return float(loss)

    with job.lever:
        job.optimizer.step(closure)
    assert "closure" in job.said[0] and not job.on_host()


def test_gradients_are_there_again_after_the_step_and_after_an_error() -> None:
    job = Job(OPTIMIZERS["adamw"])
    assert job.lever is not None
    with job.lever:
        job.model(torch.ones(2, 40)).square().mean().backward()
        before = [parameter.grad for parameter in job.model.parameters()]
        job.optimizer.step()
        assert all(p.grad is g for p, g in zip(job.model.parameters(), before, strict=True))


def test_a_step_that_raised_leaves_no_gradient_to_the_next() -> None:
    """As where memory ends in the midst of a step, and the job goes on with another batch."""
    jobs = [Job(OPTIMIZERS["adamw"]), Job(OPTIMIZERS["adamw"], plainly=True)]
    for job in jobs:
        last = list(job.model.parameters())[-1]
        with job.lever or nullcontext():
            job.model(torch.ones(2, 40)).square().mean().backward()
            job.optimizer.step()
            state = job.optimizer.state[last]
            kept, state["exp_avg"] = state["exp_avg"], torch.ones(999)
            with pytest.raises(RuntimeError):
                job.optimizer.step()
            state["exp_avg"] = kept
            job.optimizer.zero_grad()
            job.model(torch.full((2, 40), 3.0)).sum().backward()
            gradients = [parameter.grad for parameter in job.model.parameters()]
            job.optimizer.step()
            for parameter, gradient in zip(job.model.parameters(), gradients, strict=True):
                assert parameter.grad is gradient


def test_a_hook_that_comes_later_sees_gradients() -> None:
    jobs = [Job(OPTIMIZERS["adamw"]), Job(OPTIMIZERS["adamw"], plainly=True)]
    for job in jobs:
        seen: list[bool] = []
        parameters = list(job.model.parameters())
        with job.lever or nullcontext():
            for step in range(4):
                job.model(torch.ones(2, 40)).square().mean().backward()
                job.optimizer.step()
                if step == 1:
                    job.optimizer.register_step_post_hook(
                        lambda *_, seen=seen, parameters=parameters: seen.append(
                            all(parameter.grad is not None for parameter in parameters)
                        )
                    )
        assert seen == [True, True]
    assert same(*jobs) and not jobs[0].on_host() and "hooked" in jobs[0].said[0]


def test_a_scaler_skips_a_step_as_ever() -> None:
    jobs = [Job(OPTIMIZERS["adamw"]), Job(OPTIMIZERS["adamw"], plainly=True)]
    for job in jobs:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with job.lever or nullcontext():
            for step in range(4):
                loss = job.model(torch.ones(2, 40)).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
                scaler.step(job.optimizer)
                scaler.update()
                job.optimizer.zero_grad()
    assert same(*jobs)


@pytest.mark.parametrize("name", ["adamw", "fused"])
def test_a_step_that_is_wrapped_as_accelerate_does_with_a_scaler(name: str) -> None:
    """It notes that the step came, and puts the step itself back as an attribute."""
    jobs = [Job(OPTIMIZERS[name]), Job(OPTIMIZERS[name], plainly=True)]
    for job in jobs:
        scaler, optimizer, came = torch.amp.GradScaler("cpu"), job.optimizer, 0
        own: Any = optimizer.step

        def wrapped(*args: Any, own: Any = own, **kwargs: Any) -> Any:
            nonlocal came
            came += 1
            return own(*args, **kwargs)

        with job.lever or nullcontext():
            for _ in range(3):
                scaler.scale(job.model(torch.ones(2, 40)).square().mean()).backward()
                scaler.unscale_(optimizer)
                optimizer.step = wrapped  # type: ignore[method-assign]
                scaler.step(optimizer, None)
                optimizer.step = own  # type: ignore[method-assign]
                scaler.update()
                optimizer.zero_grad()
        assert came == 3
    assert same(*jobs) and jobs[0].on_host() == 4 and not jobs[0].said


def test_plain_steps_afterwards_have_it_on_the_card() -> None:
    devices: list[set[str]] = []

    def job() -> None:
        model = nn.Linear(64, 128).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            state = optimizer.state[model.weight]
            devices.append({state[name].device.type for name in ("exp_avg", "exp_avg_sq")})

        with plan_in_effect(Plan(state=StatePart(share=1.0)), [], lambda _part, _text: None):
            step()
        step()

    record(job)
    assert devices == [{"cpu"}, {"cuda"}]


def test_a_host_with_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "available_bytes", lambda: 1 << 30)
    said: list[str] = []
    for needed in (1 << 29, 1 << 31):
        part = StatePart(share=1.0, host_bytes=needed)
        with plan_in_effect(Plan(state=part), [], lambda _, text: said.append(text)):
            pass
    beside = FrozenPart(share=1.0, ahead_bytes=0, host_bytes=3 << 28)
    part = StatePart(share=1.0, host_bytes=1 << 29)
    with plan_in_effect(Plan(state=part, frozen=beside), [], lambda _, text: said.append(text)):
        pass
    assert said == [
        f"optimizer state stays on the card: the plan needs {needs} GiB of the host's memory, and "
        "1.0 GiB are left"
        for needs in ("2.0", "1.2")
    ]


def test_a_capture_has_the_state_in_page_locked_memory_of_the_host() -> None:
    notes: list[str] = []

    def job() -> None:
        model = nn.Linear(64, 128).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def planned() -> None:
        with plan_in_effect(
            Plan(state=StatePart(share=1.0)), [], lambda _, text: notes.append(text)
        ):
            job()

    plain = bytes_of(record(job), Role.OPTIMIZER_STATE)
    trace = record(planned)
    assert plain - bytes_of(trace, Role.OPTIMIZER_STATE) >= 2 * 4 * 64 * 128
    assert bytes_of(trace, Role.INPUT) == 0  # what its pieces pass through is none
    assert notes == []
