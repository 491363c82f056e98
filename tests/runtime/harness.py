"""One training step, run plainly and under tapes of every kind; all that it leaves must be equal
to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memplan.runtime.tape import (
    Decisions,
    Needed,
    Offload,
    Pass,
    Recording,
    decisions_by_call,
    groups,
    replay,
)
from memplan.types.op_names import op_name
from memplan.types.plan import OffloadPart, OpOutput, RecomputeGroup, RecomputePart

OUTPUTS = 4
"""More than any op here allocates; numbers without an output are ignored."""


@dataclass(frozen=True)
class Job:
    """`step` runs forward and backward of a model and returns what it saw."""

    model: Callable[[], nn.Module]
    step: Callable[[Any], Any]
    recomputes: bool = True
    """Whether a tape that drops everything has something to recompute."""


@dataclass
class Outcome:
    """What a step leaves behind."""

    seen: list[Any]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    generator: Tensor
    recomputations: int = 0
    calls: list[Recording] = field(default_factory=list)

    def needed(self) -> list[Needed]:
        """What the replays of each call needed."""
        return [call.learned for call in self.calls if call.learned is not None]

    def differences(self, other: Outcome) -> list[str]:
        """What is not the same bit for bit, in words."""
        found = []
        pairs: list[tuple[str, Any, Any]] = [("generator", self.generator, other.generator)]
        if len(self.seen) != len(other.seen):
            found.append(f"{len(self.seen)} and {len(other.seen)} results")
        pairs += [
            (f"result {number}", mine, theirs)
            for number, (mine, theirs) in enumerate(zip(self.seen, other.seen, strict=False))
        ]
        for kind in ("gradients", "state"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            pairs += [(f"{kind} {n}", mine.get(n), theirs.get(n)) for n in {**mine, **theirs}]
        return found + [name for name, one, two in pairs if not same_bits(one, two)]


def same_bits(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return type(one) is type(two) and bool(one == two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return _bytes(one) == _bytes(two)


def _bytes(tensor: Tensor) -> bytes:
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@contextmanager
def recorded(
    module: nn.Module, decisions: Decisions, *, verify: bool = True, needed: Sequence[Needed] = ()
) -> Iterator[list[Recording]]:
    """Every forward of `module` with gradients is recorded, the nth as one that is like a call that
    needed `needed[n]`; gives the recordings."""
    forward = module.forward
    part = OffloadPart(values=[OpOutput("", 0)] * 1000, out_bytes=500, ahead_bytes=1000)
    of_pass = Pass(Offload(part, devices=("cpu",)))
    calls: list[Recording] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        expected = needed[len(calls)] if len(calls) < len(needed) else None
        calls.append(Recording(decisions, verify=verify, needed=expected, of_pass=of_pass))
        with calls[-1]:
            return forward(*args, **kwargs)

    module.forward = record
    try:
        yield calls
    finally:
        del module.forward


@contextmanager
def recomputations() -> Iterator[list[str]]:
    """The names of the groups that are recomputed inside."""
    names: list[str] = []

    def recompute(group: str, targets: list[Any]) -> None:
        names.append(group)
        replay.recompute(group, targets)

    groups.__dict__["recompute"] = recompute
    try:
        yield names
    finally:
        groups.__dict__["recompute"] = replay.recompute


def outcome(
    job: Job,
    decisions: Decisions | None = None,
    wrap: Callable[[Any], Any] = lambda model: model,
    needed: Sequence[Needed] = (),
) -> Outcome:
    """Of one step from fixed seeds; plain where `decisions` is None."""
    calls: list[Recording] = []
    torch.manual_seed(0)
    model = job.model()
    torch.manual_seed(1)
    with recomputations() as count:
        if decisions is None:
            seen = job.step(wrap(model))
        else:
            with recorded(model, decisions, needed=needed) as calls:
                seen = job.step(wrap(model))
    seen = list(seen) if isinstance(seen, (tuple, list)) else [seen]
    return Outcome(
        seen=[item.detach().clone() if isinstance(item, Tensor) else item for item in seen],
        gradients={name: parameter.grad for name, parameter in model.named_parameters()},
        state={**model.state_dict(), **dict(model.named_buffers())},
        generator=torch.get_rng_state(),
        recomputations=len(count),
        calls=calls,
    )


class Spy(Decisions):
    """Keeps everything and notes which ops were asked about, in program order."""

    def __init__(self) -> None:
        super().__init__({})
        self.ops: list[tuple[str, int]] = []

    def of(self, func: Any, nth: int) -> None:
        self.ops.append((op_name(func), nth))


@dataclass
class Choice:
    """By op and output: a group's number, or -1 to hold."""

    groups: dict[int, list[OpOutput]] = field(default_factory=dict)
    hold: list[OpOutput] = field(default_factory=list)
    offload: list[OpOutput] = field(default_factory=list)

    def send(self, op: tuple[str, int]) -> None:
        self.offload[:0] = [OpOutput(*op, output) for output in range(OUTPUTS)]

    def add(self, op: tuple[str, int], group: int) -> None:
        places = [OpOutput(*op, output) for output in range(OUTPUTS)]
        (self.hold if group < 0 else self.groups.setdefault(group, [])).extend(places)

    def decisions(self) -> Decisions:
        part = RecomputePart(
            groups=[RecomputeGroup(f"group {n}", drop) for n, drop in self.groups.items()],
            hold=self.hold,
        )
        offload = OffloadPart(values=self.offload, out_bytes=0, ahead_bytes=0)
        return decisions_by_call(part, offload).get(0, Decisions({}))


def choices(ops: list[tuple[str, int]], *, large: bool = False) -> dict[str, Choice]:
    """Every kind of plan for a forward of these ops; a few kinds where it is large."""
    ops = list(dict.fromkeys(ops))
    made = {name: Choice() for name in ("everything", "segments", "interleaved", "away")}
    if not large:
        made["each alone"] = Choice()
    for number, op in enumerate(ops):
        made["everything"].add(op, 0)
        made["segments"].add(op, number // max(4, len(ops) // 8))
        made["interleaved"].add(op, number % 3)
        made["away"].send(op)
        if not large:
            made["each alone"].add(op, number)
    for draw in range(1 if large else 2):
        chance = random.Random(draw)
        name = f"random {draw}"
        made[name] = Choice()
        for op in ops:
            kind = chance.random()
            if kind < 0.4:
                made[name].add(op, chance.randrange(4))
            elif kind < 0.6:
                made[name].send(op)
            elif kind < 0.75:
                made[name].add(op, -1)
    return made


def check(job: Job, *, large: bool = False) -> None:
    """Under every kind of tape, the step is the plain one."""
    plain = outcome(job)
    spy = Spy()
    assert outcome(job, spy).differences(plain) == [], "nothing dropped"
    assert spy.ops
    for name, choice in choices(spy.ops, large=large).items():
        taped = outcome(job, choice.decisions())
        assert taped.differences(plain) == [], name
        again = outcome(job, choice.decisions(), needed=taped.needed())
        assert again.differences(plain) == [], f"{name}, again"
        assert again.recomputations == taped.recomputations, name
        if name == "everything":
            assert bool(taped.recomputations) == job.recomputes


def everything(job: Job) -> Decisions:
    """Drops whatever can be dropped, as one group."""
    spy = Spy()
    outcome(job, spy)
    return choices(spy.ops)["everything"].decisions()


def checkpointed(model: nn.Module) -> Callable[..., Any]:
    """The naive way: PyTorch's checkpoint runs the whole forward a second time."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(model, *args, use_reentrant=False, **kwargs)

    return call


def naive_way_fails(job: Job) -> bool:
    """Whether PyTorch's checkpoint of the whole model changes the step, or raises."""
    try:
        return outcome(job, wrap=checkpointed).differences(outcome(job)) != []
    except (RuntimeError, AttributeError):
        return True
