"""Offloaded values: what is on the card and on the host when, and that no number changes.

There is no card here: the CPU stands for it, and copies go to blocks of their own as they do there.
That the harness's steps keep their bits is tested beside recomputation, by every test that uses
`harness.check`.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda import _pin_memory_utils
from torch.utils.checkpoint import checkpoint

import memplan.runtime.host_buffers as host_buffers
from memplan.runtime.apply import AppliedEverywhere
from memplan.runtime.in_effect import plan_in_effect
from memplan.runtime.tape.offload import Away
from memplan.types.plan import OffloadPart, OpOutput, Plan, RecomputeGroup, RecomputePart
from tests.runtime.harness import same_bits
from tests.runtime.test_memory import ACTIVATION, ROWS, WIDTH, Census, Chain, activations

LAYERS = 6


def sigmoids(layers: int = LAYERS, call: int = 0) -> list[OpOutput]:
    return [OpOutput("aten.sigmoid.default", nth, 0, call) for nth in reversed(range(layers))]


def applied(
    out: int = 0,
    ahead: int = 0,
    values: list[OpOutput] | None = None,
    recompute: RecomputePart | None = None,
    notes: list[str] | None = None,
) -> AppliedEverywhere:
    """Sizes in activations of a `Chain`."""
    part = OffloadPart(
        values=sigmoids() if values is None else values,
        out_bytes=out * ACTIVATION,
        ahead_bytes=ahead * ACTIVATION,
    )
    said = notes.append if notes is not None else lambda text: pytest.fail(text)
    return AppliedEverywhere(recompute, said, part, devices=("cpu",))


def buffers(lever: AppliedEverywhere) -> tuple[int, int]:
    """Bytes on the host in use, and free for the next step."""
    assert lever.offload is not None
    found = lever.offload.buffers
    return found._in_use, sum(len(one.bytes) for one in found._free)


def steps(model: nn.Module, x: Tensor, count: int = 3) -> list[Tensor]:
    left = []
    for _ in range(count):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return left


@pytest.mark.parametrize(("out", "stay"), [(0, 1), (1, 2), (2, 3), (9, 6)])
def test_a_block_is_released_when_enough_was_copied_after_it(out: int, stay: int) -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    with applied(out) as lever, Census() as census:
        y = model(x).sum()
        assert activations(census) == stay
        assert buffers(lever) == (6 * ACTIVATION, 0)
        y.backward()
        assert activations(census) == 0
        assert buffers(lever) == (0, 6 * ACTIVATION)


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_so_much_is_fetched_ahead(ahead: int) -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    there: list[int] = []
    census = Census()
    for name, parameter in model.named_parameters():
        if "weight" in name:
            parameter.register_hook(lambda _: there.append(activations(census)))
    with applied(0, ahead), census:
        model(x).sum().backward()
    # At the gradient of a layer's weight: its input, what was fetched ahead, one gradient.
    assert there == [min(ahead, left) + 1 + (left > -1) for left in range(4, -2, -1)]


def test_the_host_s_buffers_go_round() -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    plain = steps(model, x)
    with applied(1, 1) as lever:
        assert all(map(same_bits, steps(model, x), plain))
        first = {id(one.bytes) for one in lever.offload.buffers._free}  # type: ignore[union-attr]
        steps(model, x)
        assert {id(one.bytes) for one in lever.offload.buffers._free} == first  # type: ignore[union-attr]
        steps(model, torch.randn(ROWS // 4, WIDTH))
        assert sum(buffers(lever)) <= 6 * ACTIVATION
    assert buffers(lever) == (0, 0)


def test_a_graph_that_is_never_run_backward_frees_its_buffers() -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    with applied() as lever:
        loss = model(x).sum()
        assert buffers(lever)[0] == 6 * ACTIVATION
        del loss
        assert buffers(lever) == (0, 6 * ACTIVATION)
        kept = model(x).sum()
    kept.backward()  # after the plan has gone
    assert buffers(lever) == (0, 0)
    del kept
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Away]


def test_several_views_are_copied_once_and_parameters_never() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (x @ self.weight).chunk(3, dim=-1)
            return (q.sin() @ k.t().conj()) @ v.exp() * q

    model, x = Views(), torch.randn(ROWS, WIDTH)
    plain = steps(model, x)
    names = [OpOutput("aten.mm.default", nth) for nth in range(2)]
    names += [OpOutput(f"aten.{name}.default", 0) for name in ("sin", "exp")]
    with applied(values=names) as lever:
        loss = model(x).sum()
        assert buffers(lever)[0] == 4 * ROWS * (3 * WIDTH + ROWS + 2 * WIDTH)
        del loss
        assert all(map(same_bits, steps(model, x), plain))


def test_a_second_backward_through_a_retained_graph() -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH, requires_grad=True)
    y = model(x).sum()
    plain = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]
    with applied(1, 1):
        y = model(x).sum()
        again = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]
        assert all(map(same_bits, again, plain))
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert same_bits(second, torch.autograd.grad(first.square().sum(), x)[0])


def test_forwards_before_and_between_backwards() -> None:
    model = Chain()
    batches = [torch.randn(ROWS, WIDTH) for _ in range(4)]

    def accumulate() -> list[Any]:
        model.zero_grad()
        losses = [model(x).square().mean() for x in batches[:2]]
        losses[0].backward()
        losses += [model(x).square().mean() for x in batches[2:]]
        for loss in (losses[3], losses[1], losses[2]):
            loss.backward()
        return [*losses, *(p.grad for p in model.parameters())]

    plain = accumulate()
    values = [value for call in (1, 0) for value in sigmoids(call=call)]
    with applied(1, 2, values):
        for _ in range(2):
            assert all(map(same_bits, accumulate(), plain))


def test_a_recomputation_fetches_what_it_reads() -> None:
    class Pairs(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.exp(torch.sigmoid(layer(x)) * 0.1)
            return x

    model, x = Pairs(), torch.randn(ROWS, WIDTH)
    plain = steps(model, x)
    dropped = [
        OpOutput(f"aten.{op}", nth) for op in ("exp.default", "mul.Tensor") for nth in range(6)
    ]
    part = RecomputePart(
        groups=[RecomputeGroup("exp", dropped[:6]), RecomputeGroup("m", dropped[6:])]
    )
    with applied(0, 0, recompute=part), Census() as census:
        loss = model(x).square().mean()
        assert activations(census) <= 2
        del loss
        assert all(map(same_bits, steps(model, x), plain))


@pytest.mark.parametrize("out", [0, 9])
def test_what_is_modified_after_it_was_saved_is_refused_as_ever(out: int) -> None:
    class Spoils(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.layers[0](x))
            z = torch.sigmoid(self.layers[1](y))
            y.mul_(2)
            return z

    class Returns(Chain):
        def forward(self, x: Tensor) -> Any:
            y = torch.sigmoid(self.layers[0](x))
            return torch.sigmoid(self.layers[1](y)), y

    x = torch.randn(ROWS, WIDTH)
    with applied(out, values=sigmoids(2)):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*256, 64"):
            Spoils()(x).sum().backward()
        z, y = Returns()(x)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match=r"is at version 1; expected version 0"):
            z.sum().backward()


def test_a_write_that_no_version_shows_is_seen_by_backward_as_ever() -> None:
    class Writes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.sigmoid(layer(x))
                y = x.exp()
                x.data.mul_(0.5)
                x = x + y
            return x

    model, x = Writes(), torch.randn(ROWS, WIDTH)
    plain = steps(model, x)
    for out in (0, 9):
        with applied(out):
            assert all(map(same_bits, steps(model, x), plain))


def test_a_host_without_memory_keeps_everything_on_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_nbytes: int) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(host_buffers.HostBuffers, "_new", lambda *_: none_left(0))
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    plain, notes = steps(model, x), list[str]()
    with applied(notes=notes):
        assert all(map(same_bits, steps(model, x), plain))
    assert notes == ["what the plan offloads stays on the card from here on: no more"]


def test_a_plan_for_another_job_is_noted() -> None:
    notes: list[str] = []
    with applied(values=sigmoids(9), notes=notes):
        steps(Chain(), torch.randn(ROWS, WIDTH))
    assert len(notes) == 1 and notes[0].startswith("6 of the 9 values")


def test_what_came_back_changed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a copy that nobody waited for: the first pass is checked."""
    fetch = Away.fetch

    def spoiled(away: Away, value: Any) -> None:
        fetch(away, value)
        value.base[3] += 1

    monkeypatch.setattr(Away, "fetch", spoiled)
    with applied(), pytest.raises(Exception, match=r"modified|other values"):
        steps(Chain(), torch.randn(ROWS, WIDTH))


def test_an_error_in_forward_leaves_nothing_on_the_host() -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    model.layers.append(nn.Linear(3, 3))
    with applied() as lever:
        with pytest.raises(RuntimeError):
            model(x)
        assert buffers(lever)[0] == 0


def test_checkpointing_in_the_script() -> None:
    class Checkpointed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = torch.sigmoid(layer(x))
                x = checkpoint(
                    lambda y, layer=layer: torch.sigmoid(layer(y)).exp(),
                    x,
                    use_reentrant=bool(number % 2),
                )
            return x

    model, x = Checkpointed(), torch.randn(ROWS, WIDTH)
    plain = steps(model, x)
    with applied(1, 1, sigmoids(12)):
        assert all(map(same_bits, steps(model, x), plain))


def test_a_host_with_too_little_is_told_so_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = OffloadPart(values=sigmoids(), out_bytes=0, ahead_bytes=0, host_bytes=3 << 30)
    notes: list[str] = []
    monkeypatch.setattr(host_buffers, "available_bytes", lambda: 5 << 30)
    with plan_in_effect(Plan(offload=part), [], lambda _, text: notes.append(text)):
        assert notes == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with plan_in_effect(Plan(offload=part), [], lambda _, text: notes.append(text)):
        steps(Chain(), torch.randn(ROWS, WIDTH))
    assert notes == [
        "nothing is offloaded: the plan needs 3.0 GiB of the host's memory for each of its 2 "
        "processes, and 5.0 GiB are left"
    ]


def test_what_the_host_has_left_is_known() -> None:
    left = host_buffers.available_bytes()
    assert left is None or 0 < left < 1 << 50


def test_a_host_that_refuses_to_lock_pages_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_address: int, _size: int) -> None:
        raise RuntimeError("not permitted")

    monkeypatch.setattr(_pin_memory_utils, "pin_memory", refuse)
    notes: list[str] = []
    found = host_buffers.HostBuffers(notes.append)
    card: Any = SimpleNamespace(is_cuda=True)
    assert [len(found.take(size, card).bytes) for size in (100, 5000)] == [100, 5000]
    assert notes == ["the host's memory is not page-locked, copies are slower: not permitted"]
