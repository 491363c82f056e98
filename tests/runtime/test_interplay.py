"""A tape beside other things: errors, threads, transforms, compilers, other modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from memplan.runtime.tape import Decisions, Recording, functions
from memplan.types.errors import RecomputeError
from tests.runtime.harness import Job, check, everything, outcome, recorded, same_bits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(torch.exp(self.first(x)), 0.2)
        return torch.sigmoid(self.second(x)) * x


def step(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad]


def nothing_left() -> bool:
    """No mode, no hook and no patch is in force."""
    return (
        _get_current_dispatch_mode_stack() == []
        and functions._top_hooks(True) is None
        and "apply" not in functions._function.__dict__
        and torch.autograd.graph.disable_saved_tensors_hooks is functions._refuse_hooks
    )


def test_an_error_in_forward_leaves_nothing_behind() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    x = torch.randn(3, requires_grad=True)
    for fail in (lambda: Double.apply(x), lambda: x @ torch.ones(4), lambda: [][1]):
        with (
            pytest.raises((ZeroDivisionError, RuntimeError, IndexError)),
            Recording(Decisions({})) as recording,
        ):
            assert not nothing_left()
            fail()
        assert nothing_left()
        assert not recording.storages._live and not recording._opaque


def test_an_error_that_forward_handles() -> None:
    class Tries(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.exp(self.first(x))
            work = torch.sin(x.detach())
            for bad in (torch.ones(5), torch.ones(3, 9)):
                try:
                    work.add_(bad)
                except RuntimeError:
                    x = torch.sin(x * work)
            return x.exp() * work

    check(Job(Tries, step))


def test_an_input_whose_memory_was_released_is_named() -> None:
    def spoiled(model: Any) -> list[Any]:
        loss = model(torch.randn(6, 8)).square().mean()
        model.first.bias.untyped_storage().resize_(0)
        loss.backward()
        return []

    with pytest.raises(RecomputeError, match=r"group 0: .* of shape \[8\], has no memory"):
        outcome(Job(Net, spoiled), everything(Job(Net, step)))
    assert nothing_left()


def test_an_error_while_recomputing_says_what_was_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoiled(model: Any) -> list[Any]:
        loss = model(torch.randn(6, 8)).square().mean()
        monkeypatch.delattr("memplan.runtime.tape.replay._thaw")
        loss.backward()
        return []

    with pytest.raises(NameError) as raised:
        outcome(Job(Net, spoiled), everything(Job(Net, step)))
    assert "recomputing group 0 for the backward pass" in raised.value.__notes__[0]
    assert "aten.addmm.default (number 1 of its kind)" in raised.value.__notes__[0]
    assert nothing_left()


def in_thread(work: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def forward_elsewhere(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    loss = in_thread(lambda: model(x)).square().mean()
    loss.backward()
    return [loss, x.grad]


def backward_elsewhere(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    in_thread(loss.backward)
    return [loss, x.grad]


def nested_threads(model: Any) -> list[Any]:
    """As DataParallel does: the forward of the root runs parts in threads of their own."""
    x = torch.randn(6, 8, requires_grad=True)
    halves = in_thread(lambda: [model(half) for half in x.chunk(2)])
    loss = torch.cat(halves).square().mean()
    loss.backward()
    return [loss, x.grad]


@pytest.mark.parametrize("run", [forward_elsewhere, backward_elsewhere, nested_threads])
def test_other_threads(run: Any) -> None:
    check(Job(Net, run))


def test_replicas_in_threads_inside_a_forward() -> None:
    class Parallel(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.exp(x)
            parts = [in_thread(lambda half=half: super(Parallel, self).forward(half))
                     for half in x.chunk(2)]  # fmt: skip
            return torch.sin(torch.cat(parts)).exp() * x

    check(Job(Parallel, step))


def test_two_threads_record_at_once() -> None:
    """Neither takes the other's patches away, nor its functions for its own."""
    both = threading.Barrier(2)
    results: dict[tuple[int, bool], list[Any]] = {}

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            x.detach().numpy()[...] *= 2
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class All(Decisions):
        def of(self, func: Any, nth: int) -> dict[int, str]:
            return {0: "all", 1: "all"}

    class Spoken(Net):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            both.wait()
            x = torch.exp(Twice.apply(torch.sin(self.first(x)) + 1))
            both.wait()
            if self.number:
                return torch.exp(x)
            done.wait()  # the other has left
            return torch.exp(torch.sin(Twice.apply(x + 1)))

    def work(number: int, taped: bool) -> None:
        with torch.random.fork_rng(devices=[]), lock:
            torch.manual_seed(number)
            model, x = Spoken(number), torch.randn(6, 8, requires_grad=True)
        if taped:
            with recorded(model, All({})):
                loss = model(x).mean()
        else:
            loss = model(x).mean()
        if number:
            done.set()
        loss.backward()
        results[number, taped] = [loss.detach(), x.grad, model.first.weight.grad]

    lock = threading.Lock()
    for taped in (False, True):
        done = threading.Event()
        threads = [threading.Thread(target=work, args=(n, taped)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert len(results) == 4
    for number in (0, 1):
        pairs = zip(results[number, True], results[number, False], strict=True)
        assert all(same_bits(one, two) for one, two in pairs)
    assert nothing_left()


def test_functions_of_other_threads_are_not_ours() -> None:
    depths: list[int] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            depths.append(recording._opaque)
            return x.clone()

    x = torch.randn(3, requires_grad=True)
    with Recording(Decisions({})) as recording:
        Looks.apply(x)
        in_thread(lambda: Looks.apply(x))
    assert depths == [1, 0]


class Transformed(nn.Module):
    """`torch.func` in forward, which refuses saved-tensor hooks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), kind

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        if self.kind == "vmap":
            made = torch.func.vmap(lambda row: torch.exp(self.net(row)) * row.sum())(x)
        elif self.kind == "vmap with randomness":
            made = torch.func.vmap(
                lambda row: nn.functional.dropout(self.net(row)).exp(), randomness="different"
            )(x)
        elif self.kind == "grad":
            made = torch.func.vmap(torch.func.grad(lambda row: self.net(row).exp().sum()))(x)
        elif self.kind == "jacrev":
            made = torch.func.vmap(torch.func.jacrev(self.net))(x).exp().sum(1)
        elif self.kind == "functional_call":
            weights = {name: p.exp() * 0.1 for name, p in self.net.named_parameters()}
            made = torch.func.functional_call(self.net, weights, (x,)).exp()
        else:
            made = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))[1].exp()
        return torch.sin(made) * x.exp()


@pytest.mark.parametrize(
    "kind", ["vmap", "vmap with randomness", "grad", "jacrev", "functional_call", "jvp"]
)
def test_function_transforms(kind: str) -> None:
    check(Job(lambda: Transformed(kind), step))


def test_transforms_still_refuse_the_hooks_of_others() -> None:
    class Hooked(Transformed):
        def forward(self, x: Tensor) -> Tensor:
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                return super().forward(x)

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        outcome(Job(lambda: Hooked("grad"), step), Decisions({}))
    assert nothing_left()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_part() -> None:
    """It is compiled as it was without us, and nothing of ours is compiled with it."""

    class Part(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return torch.sin(self.first(x).exp()) * x.sum().item()  # which Dynamo leaves to eager

    class Partly(Net):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.compile(Part(), backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(super().forward(self.part(torch.sin(x))))

    def frames(model: Any) -> list[Any]:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        seen = step(model)
        return [*seen, counters["stats"]["unique_graphs"]]

    job = Job(Partly, frames)
    plain = outcome(job)
    assert plain.seen[-1] == 2
    assert outcome(job, everything(Job(Partly, step))).differences(plain) == []


def test_ops_of_higher_order() -> None:
    from torch._higher_order_ops import cond
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            with torch.no_grad():
                q = x.detach().view(1, 2, 3, 8)
                mixed = torch.sin(flex_attention(q, q.exp(), q.sin())).view(6, 8)
                mixed = cond(x.sum() > 1e9, lambda y: y.sin(), lambda y: y.cos(), (mixed,))
            return torch.exp(x * mixed)

    job = Job(Flexible, step)
    assert outcome(job, everything(job)).differences(outcome(job)) == []


def test_other_modes() -> None:
    def counted(model: Any) -> list[Any]:
        with FlopCounterMode(display=False) as counter:
            x = torch.randn(6, 8, requires_grad=True)
            loss = model(x).square().mean()
        forward = counter.get_total_flops()
        loss.backward()
        return [loss, x.grad, forward]

    check(Job(Net, counted))


@contextmanager
def set_to(set_: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(back)


def default_dtype(x: Tensor) -> Tensor:
    with set_to(torch.set_default_dtype, torch.float64, torch.float32):
        return x * torch.sqrt(torch.arange(8)).float()


def without_onednn(x: Tensor) -> Tensor:
    with set_to(torch._C._set_mkldnn_enabled, False, True):
        image = torch.sin(torch.linspace(0, 99, 2**15)).view(1, 8, 64, 64) * x.detach().sum()
        made = nn.functional.conv2d(image, torch.linspace(-1, 1, 576).view(8, 8, 3, 3))
        return x * torch.sin(made.sum() * 1e4)


def two_threads(x: Tensor) -> Tensor:
    many = torch.linspace(-1, 1, 300_000) * x.detach().sum()
    with set_to(torch.set_num_threads, 2, 1):
        return x * torch.sin(many.sum() * 1e4)


def filled(x: Tensor) -> Tensor:
    with set_to(torch.use_deterministic_algorithms, True, False):
        made = torch.empty(6, 8)
        made[:3] = 1.0
        return x * torch.nan_to_num(made, 3.0)


@pytest.mark.parametrize("middle", [default_dtype, without_onednn, two_threads, filled])
def test_settings_are_those_of_the_first_run(middle: Callable[[Tensor], Tensor]) -> None:
    class Sets(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(middle(super().forward(x))).exp()

    check(Job(Sets, step))


def test_nested_tensors() -> None:
    """Tensors that are more than a view of a storage are saved as they are."""

    class Ragged(Net):
        def forward(self, x: Tensor) -> Tensor:
            rows = [torch.exp(x[:2]), x[2:]]
            made = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            return super().forward(torch.cat(list(self.first(made).sin().unbind())))

    check(Job(Ragged, step))


def test_profiles_name_what_is_recomputed() -> None:
    def profiled(model: Any) -> list[Any]:
        with torch.profiler.profile() as profile:
            step(model)
        return [sorted({e.key for e in profile.key_averages() if "memplan" in e.key})]

    job = Job(Net, profiled)
    assert outcome(job).seen == [[]]
    assert outcome(job, everything(Job(Net, step))).seen == [["memplan.recompute[group 0]"]]


def test_a_checksum_error_survives_the_engine_with_its_hint() -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            made = torch.zeros(6, 8)
            made.numpy()[...] = 2
            return super().forward(x) * made

    job = Job(Writes, step)
    with pytest.raises(RecomputeError) as raised:
        outcome(job, everything(job))
    assert "try: " in str(raised.value)
