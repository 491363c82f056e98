"""A compiled step is run only where it is the step that would run: everything that it was captured
with is looked at, and what differs is captured again, with a line that says what it was."""

from __future__ import annotations

import contextvars
import enum
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan.api as memplan
from memplan.runtime.compiled import guards
from tests.runtime.compiled.test_bit_identity import Norm, adam, cross_entropy, perceptron
from tests.runtime.compiled.training import Job, batches, course_of, run_both

scale = 1.0


class Scaled(nn.Module):
    """Reads a plain attribute, a nested config and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.factor = 2.0
        self.config = Config(power=1.0, names=["a"])
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor * self.config.power * len(self.config.names) + self.shift


@dataclass
class Config:
    power: float
    names: list[str]


def changed(
    build: Callable[[], nn.Module],
    change: Callable[[Job], object],
    shape: tuple[int, ...] = (5, 6),
    step_of: Callable[..., Any] = cross_entropy,
    calls: int = 8,
    at: int = 4,
) -> Callable[[], Job]:
    """A job in which something changes after its fourth call."""

    def make() -> Job:
        model = build()
        optimizer = adam(model.parameters())
        job = Job(model, optimizer, step_of(model, optimizer), batches(shape, count=calls))
        done = 0

        def after() -> None:
            nonlocal done
            done += 1
            if done == at:
                change(job)

        job.after = after
        return job

    return make


def again(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "captured again" in r.getMessage()]


def freeze(job: Job) -> None:
    next(job.model.parameters()).requires_grad_(False)


def replace_weight(job: Job) -> None:
    layer = job.model.get_submodule("0")
    with torch.no_grad():
        layer.weight.data = layer.weight.detach().clone().t().contiguous().t()


def share(job: Job) -> None:
    """Another parameter's memory."""
    job.model.get_submodule("2").bias.data = job.model.get_submodule("0").bias.data


def set_global(job: Job) -> None:
    globals()["scale"] = 0.5


def reading_a_global(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x * scale, y)

    return step


def without_zeroing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class OfClass(nn.Module):
    """Reads an attribute of its class, and one of a parameter."""

    power = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        weight: Any = self.inner.get_submodule("0").weight
        weight.factor = 1.0
        self.masks = {"first": torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        factor: Any = self.inner.get_submodule("0").weight
        return self.inner(x) * self.power * factor.factor * self.masks["first"]


def of_class() -> nn.Module:
    OfClass.power = 2.0
    return OfClass()


def set_power(job: Job) -> None:
    OfClass.power = 3.0


def set_factor(job: Job) -> None:
    job.model.inner.get_submodule("0").weight.factor = 3.0


def new_masks(job: Job) -> None:
    """Another dict with the same keys."""
    job.model.masks = {"first": torch.full((4,), 0.5)}


def load_state(job: Job) -> None:
    """Dicts of its own for each parameter's state."""
    state = job.optimizer.state_dict()
    for one in state["state"].values():
        one["exp_avg"] = one["exp_avg"] * 2
    job.optimizer.load_state_dict(state)


def in_words(how: str) -> Callable[[], Job]:
    """A job whose step multiplies its input by a number that it finds in one way or another, which
    is another number after the fourth call."""

    def make() -> Job:
        read, write = HOLDERS[how]()

        def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            plain = cross_entropy(model, optimizer)
            return lambda x, y: plain(x * read(), y)

        return changed(perceptron, lambda job: write(3.0), step_of=step_of)()

    return make


Holder = tuple[Callable[[], Any], Callable[[float], object]]


def held_by_tensor() -> Holder:
    tensor: Any = torch.ones(6)
    tensor.factor = 1.0
    return lambda: tensor * tensor.factor, lambda value: setattr(tensor, "factor", value)


class Mode(enum.Enum):
    FAST = 1


def held_by_enum() -> Holder:
    member: Any = Mode.FAST
    member.factor = 1.0
    return lambda: Mode.FAST.factor, lambda value: setattr(member, "factor", value)  # type: ignore[attr-defined]


def held_by_defaults() -> Holder:
    def read(factor: float = 1.0) -> float:
        return factor

    return read, lambda value: setattr(read, "__defaults__", (value,))


def held_by_code() -> Holder:
    def read() -> float:
        return 1.0

    def other() -> float:
        return 3.0

    return read, lambda value: setattr(read, "__code__", other.__code__)


def held_by_function() -> Holder:
    def read() -> Any:
        return read.factor  # type: ignore[attr-defined]

    read.factor = 1.0  # type: ignore[attr-defined]
    return read, lambda value: setattr(read, "factor", value)


def held_by_cache() -> Holder:
    found = [1.0]
    read = functools.cache(lambda: found[0])
    read()

    def write(value: float) -> None:
        """All but what the cache has is as before."""
        read.cache_clear()
        found[0] = value
        read()
        found[0] = 1.0

    return read, write


FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


def held_by_context() -> Holder:
    FACTOR.set(1.0)
    return FACTOR.get, FACTOR.set


def held_by_weak_keys() -> Holder:
    weak: Any = weakref.WeakKeyDictionary({Mode: 1.0})
    return lambda: weak[Mode], lambda value: weak.__setitem__(Mode, value)


class Named(dict[str, float]):
    factor = 1.0


def held_by_kind_of_dict() -> Holder:
    named = Named()
    named.factor = 1.0
    return lambda: named.factor, lambda value: setattr(named, "factor", value)


def held_by_class() -> Holder:
    one, two = type("One", (), {"factor": 1.0}), type("Two", (), {"factor": 3.0})
    held = one()
    return lambda: held.factor, lambda value: setattr(held, "__class__", two)


def held_by_module() -> Holder:
    from tests.runtime.compiled import training

    set_factor = functools.partial(setattr, training, "factor")
    set_factor(1.0)
    return lambda: training.factor, set_factor  # type: ignore[attr-defined]


def held_by_imported_module() -> Holder:
    from tests.runtime.compiled import training

    def read() -> Any:
        from tests.runtime.compiled.training import factor  # type: ignore[attr-defined]

        return factor

    set_factor = functools.partial(setattr, training, "factor")
    set_factor(1.0)
    return read, set_factor


def held_by_globals() -> Holder:
    globals()["scale"] = 1.0
    return lambda: globals()["scale"], lambda value: globals().__setitem__("scale", value)


def held_by_order() -> Holder:
    held = {"one": 1.0, "two": 3.0}
    return lambda: next(iter(held.values())), lambda value: held.update(one=held.pop("one"))


def held_by_bound_method() -> Holder:
    held = {"factor": 1.0}
    return functools.partial(held.get, "factor"), lambda value: held.update(factor=value)


def held_by_view() -> Holder:
    held = {"factor": 1.0}
    view = held.values()
    return lambda: sum(view), lambda value: held.update(factor=value)


HOLDERS: dict[str, Callable[[], Holder]] = {
    name.removeprefix("held_by_"): function
    for name, function in list(globals().items())
    if name.startswith("held_by_")
}


@pytest.mark.parametrize("how", HOLDERS)
def test_a_number_is_seen_wherever_it_is(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing but the step itself leads to it."""
    compiled, _ = run_both(in_words(how), order=False)
    assert len(again(caplog)) == 1
    assert compiled.report().compiled_calls >= 4


CHANGES: dict[str, tuple[Callable[[], Job], str]] = {
    "training flag": (changed(Norm, lambda j: j.model.eval(), (4, 3, 6, 6)), "training"),
    "one layer's flag": (
        changed(Norm, lambda j: j.model.drop.eval(), (4, 3, 6, 6)),
        "drop.training",
    ),
    "attribute": (changed(Scaled, lambda j: setattr(j.model, "factor", 3.0)), "factor"),
    "dropout": (changed(Norm, lambda j: setattr(j.model.drop, "p", 0.6), (4, 3, 6, 6)), "drop.p"),
    "config": (changed(Scaled, lambda j: setattr(j.model.config, "power", 3.0)), "config.power"),
    "list": (changed(Scaled, lambda j: j.model.config.names.append("b")), "config.names[1]"),
    "global": (changed(perceptron, set_global, step_of=reading_a_global), "global scale"),
    "weight decay": (
        changed(perceptron, lambda j: j.optimizer.param_groups[0].update(weight_decay=0.1)),
        "weight_decay",
    ),
    "frozen": (changed(perceptron, freeze), "gradient"),
    "layout": (changed(perceptron, replace_weight), "strides"),
    "sharing": (changed(perceptron, share), "shares its memory"),
    "hook": (
        changed(perceptron, lambda j: j.model.register_forward_hook(lambda m, i, o: o * 2)),
        "_forward_hooks",
    ),
    "gradients freed": (
        changed(perceptron, lambda j: j.optimizer.zero_grad(), step_of=without_zeroing),
        "has no gradient before the step",
    ),
    "class": (changed(of_class, set_power), "OfClass.power"),
    "parameter's attribute": (changed(of_class, set_factor), "factor"),
    "replaced dict": (changed(of_class, new_masks), "masks"),
    "optimizer's state": (changed(perceptron, load_state), "optimizer.state"),
    "deterministic": (
        changed(perceptron, lambda j: torch.use_deterministic_algorithms(True)),
        "deterministic",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_calls_is_captured_again(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, said = CHANGES[what]
    before = torch.are_deterministic_algorithms_enabled()

    def fresh() -> Job:
        monkeypatch.setitem(globals(), "scale", 1.0)
        torch.use_deterministic_algorithms(before)
        return make()

    try:
        compiled, _ = run_both(fresh, order=False)
    finally:
        torch.use_deterministic_algorithms(before)
    lines = again(caplog)
    assert len(lines) >= 1, compiled.report()
    assert said in lines[0]
    assert not compiled.report().fallback
    assert compiled.report().compiled_calls >= 4


@pytest.mark.parametrize(
    "what",
    [
        "attribute",
        "config",
        "list",
        "weight decay",
        "hook",
        "training flag",
        "dropout",
        "class",
        "replaced dict",
    ],
)
def test_the_bits_differ_where_a_guard_is_missing(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without the guards the old program runs on."""
    monkeypatch.setattr(guards.Guards, "before_reading", lambda *_: "")
    monkeypatch.setattr(guards.Guards, "of_inputs", lambda *_: "")
    with pytest.raises(AssertionError, match="after step 4"):
        run_both(CHANGES[what][0], order=False)


@pytest.mark.parametrize("shared", [0, 3])
def test_one_tensor_given_twice_is_not_two(shared: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nor two halves of one tensor, which lie as the same half given twice does."""

    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())

        def step(x: Tensor, z: Tensor) -> Tensor:
            loss = (model(x) * model(z).detach()).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        whole = [x for x, _ in batches((10, 6), count=7)]
        calls = [(x[:5], x[:5] if (n < 3) == (shared == 0) else x[5:]) for n, x in enumerate(whole)]
        return Job(model, optimizer, step, calls)

    compiled, _ = run_both(make)
    assert len(again(caplog)) == 1
    assert compiled.report().compiled_calls == 4


def test_two_names_of_one_tensor_are_two_when_they_part() -> None:
    """An LSTM's two states start as one tensor of zeros."""

    def make() -> Job:
        model = nn.LSTMCell(6, 4)
        optimizer = adam(model.parameters())
        model.hidden = model.cell = torch.zeros(5, 4)

        def step(x: Tensor, y: Tensor) -> Tensor:
            hidden, cell = model(x, (model.hidden, model.cell))
            loss = F.cross_entropy(hidden, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.hidden, model.cell = hidden.detach(), cell.detach()
            return loss.detach()

        job = Job(model, optimizer, step, batches((5, 6), count=7))
        done = 0

        def after() -> None:
            nonlocal done
            done += 1
            if done == 1:
                model.hidden = model.cell = torch.zeros(5, 4)

        job.after = after
        return job

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4


def test_a_scaler_that_the_step_holds_does_not_hinder() -> None:
    """Not where it leaves an update out, either: the fifth batch has an infinity."""

    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        calls = batches((5, 6), count=7)
        calls[4] = (calls[4][0] * float("inf"), calls[4][1])
        return Job(model, optimizer, step, calls)

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 5


def test_a_hook_on_a_gradient_that_comes_later_is_seen() -> None:
    def hook(job: Job) -> None:
        job.model.get_submodule("0").weight.register_hook(lambda gradient: gradient * 2)

    with pytest.warns(UserWarning, match="a hook on the gradient"):
        compiled, _ = run_both(changed(perceptron, hook))
    assert compiled.report().fallback


def test_draws_of_a_generator_of_ones_own_stay_in_order() -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        plain = cross_entropy(model, optimizer)
        own = torch.Generator().manual_seed(2)

        def step(x: Tensor, y: Tensor) -> Any:
            first = torch.randn(4, generator=own)
            loss = plain(x + torch.randn(x.shape, generator=own), y)
            return loss, first, torch.rand(3, generator=own)

        return Job(model, optimizer, step, batches((5, 6)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4


def test_a_learning_rate_may_change_while_a_branch_on_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def branching(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        plain = cross_entropy(model, optimizer)

        def step(x: Tensor, y: Tensor) -> Any:
            return plain(x * (2.0 if optimizer.param_groups[0]["lr"] > 0.005 else 1.0), y)

        return step

    def make() -> Job:
        job = changed(perceptron, lambda job: None, step_of=branching)()
        rates = iter((0.01, 0.011, 0.012, 0.013, 0.001, 0.002, 0.003, 0.004))
        job.after = lambda: job.optimizer.param_groups[0].update(lr=next(rates))
        return job

    compiled, _ = run_both(make)
    assert len(again(caplog)) == 1
    assert compiled.report().compiled_calls == 5


def test_an_old_shape_comes_back_to_its_program(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        sizes = (5, 5, 5, 3, 3, 5, 3, 5)
        calls = [batches((size, 6), count=1)[0] for size in sizes]
        return Job(model, optimizer, cross_entropy(model, optimizer), calls)

    compiled, _ = run_both(make)
    assert again(caplog) == [
        "memplan: step is captured again: argument 0 is [3, 6] float32 on cpu, strides [6, 1] "
        "instead of [5, 6] float32 on cpu, strides [6, 1]"
    ]
    report = compiled.report()
    assert sorted(program.calls for program in report.programs) == [2, 3]
    assert report.plain_calls == 3


def test_plain_arguments_count_by_value(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        plain = cross_entropy(model, optimizer)

        def step(x: Tensor, y: Tensor, factor: float) -> Any:
            return plain(x * factor, y)

        factors = (1.0, 1.0, 1.0, 0.5, 0.5, 1.0)
        calls = [(*one, factor) for one, factor in zip(batches((5, 6)), factors, strict=True)]
        return Job(model, optimizer, step, calls)

    compiled, _ = run_both(make)
    assert again(caplog) == ["memplan: step is captured again: argument 2 is 0.5 instead of 1.0"]
    assert compiled.report().compiled_calls == 3


def test_under_autocast_and_out_of_it(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        job = Job(model, optimizer, None, batches((5, 6), count=7))  # type: ignore[arg-type]
        job.step = cross_entropy(model, optimizer)
        return job

    def within(step: Any) -> Any:
        calls = 0

        def call(x: Tensor, y: Tensor) -> Any:
            nonlocal calls
            calls += 1
            with torch.autocast("cpu", torch.bfloat16, enabled=calls > 3):
                return step(x, y)

        return call

    torch.manual_seed(1)
    plain_job = make()
    plain = course_of(plain_job, within(plain_job.step))
    torch.manual_seed(1)
    job = make()
    compiled = memplan.compile(job.step, model=job.model, optimizer=job.optimizer, order=False)
    assert course_of(job, within(compiled)) == plain
    assert "autocast on the CPU is True" in again(caplog)[0]
    assert compiled.report().compiled_calls == 4


def test_a_cache_that_others_fill_is_no_change() -> None:
    found = {"factor": 1.0}

    @functools.cache
    def read(number: int) -> float:
        return found["factor"] * number

    def make() -> Job:
        read.cache_clear()
        model = perceptron()
        optimizer = adam(model.parameters())
        inner = cross_entropy(model, optimizer)
        calls = iter(range(100, 200))

        def step(x: Tensor, y: Tensor) -> Tensor:
            return inner(x * read(3), y)

        return Job(model, optimizer, step, batches((5, 6)), after=lambda: read(next(calls)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4
