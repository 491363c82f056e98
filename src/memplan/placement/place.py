"""The smallest card and MIG profile that hold a job's high bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from memplan import __version__
from memplan.estimation import estimate
from memplan.placement.answer import Placement, Slot
from memplan.placement.mig import slices_of
from memplan.types.device import DEFAULT_PROFILE, DeviceProfile, find_profile, known_profiles
from memplan.types.errors import FormatError, UsageError
from memplan.types.estimate import SCHEMA_VERSION, Estimate
from memplan.types.trace import Trace

_ONE_RANK = (
    "a trace is of one rank, and others may need more: the answer of memplan estimate --json is of "
    "all that can differ"
)


@dataclass(frozen=True)
class Demand:
    """A job to be placed.

    Attributes:
        estimate: the answer about it, or about the rank that needs most.
        seen: the card that it was captured for.
        on: the high bound of what it needs of a card, in bytes, and whether the card holds it.
        notes: what to say beside.
    """

    estimate: Estimate
    seen: DeviceProfile
    on: Callable[[DeviceProfile], tuple[int, bool]]
    notes: tuple[str, ...] = ()


def demand_of_trace(trace: Trace) -> Demand:
    """Each card is answered for by a replay through the allocator that it would have."""
    seen = find_profile(trace.meta.gpu or DEFAULT_PROFILE)

    def on(card: DeviceProfile) -> tuple[int, bool]:
        answer = estimate(trace, card)
        return answer.high_bytes * answer.card_processes, answer.fits is True

    answer = estimate(trace, seen)
    several = answer.host_processes > 1
    return Demand(answer, seen, on, (_ONE_RANK,) if several else ())


def demand_of_answer(encoded: bytes) -> Demand:
    """The demand in the JSON of `estimate` or `fit`: the high bound, with the context of each card.
    Raises FormatError for another file."""
    answer, *notes = _estimate_in(encoded)
    if answer.schema_version != SCHEMA_VERSION:
        raise FormatError(
            f"an answer of version {answer.schema_version}; this memplan reads {SCHEMA_VERSION}",
            "memplan estimate --json … with this release",
        )
    counts = (answer.host_processes, answer.card_processes, answer.world_size)
    if answer.high_bytes < 0 or any(count is not None and count < 1 for count in counts):
        raise FormatError("an answer with figures that no job has", "memplan estimate --json …")
    seen = find_profile(answer.gpu.name if answer.gpu else DEFAULT_PROFILE)

    def on(card: DeviceProfile) -> tuple[int, bool]:
        high = answer.high_bytes + card.context_high_bytes - seen.context_high_bytes
        needed = max(high, answer.high_bytes) * answer.card_processes
        if card == seen and answer.fits is not None:
            return needed, answer.fits
        return needed, needed <= card.total_memory_bytes

    return Demand(answer, seen, on, tuple(notes))


class _Fit(msgspec.Struct):
    fits: bool
    before: Estimate | None
    after: Estimate | None
    plan: str | None = None
    reason: str = ""
    """Why a combination of a sweep has no estimate."""


def _estimate_in(encoded: bytes) -> tuple[Estimate, *tuple[str, ...]]:
    """The estimate in an answer, and notes about it."""
    try:
        fit = msgspec.json.decode(encoded, type=_Fit)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    else:
        if fit.fits and fit.after is not None:
            start = f"memplan run --plan {fit.plan or 'PLAN'} …"
            return fit.after, f"this is what the job needs with its plan: {start}"
        if fit.before is None:
            raise FormatError(
                f"an answer without an estimate: {fit.reason}",
                "the answer about another combination",
            )
        return (fit.before,)
    try:
        return (msgspec.json.decode(encoded, type=Estimate),)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    raise FormatError(
        "neither a trace nor an answer of memplan",
        "memplan estimate --json … > answer.json, or memplan estimate -o job.trace …",
    )


def place(
    demand: Demand,
    named: DeviceProfile | None = None,
    world: int | None = None,
    per_node: int | None = None,
) -> Placement:
    """What to ask for.

    `named`: this card and its slices, no other. `world`, `per_node`: processes of the job and of a
    node, where the capture does not say. Cards of another compute capability than that of the
    capture are not taken: other kernels would run there. Raises UsageError for a named one of
    another, for processes that do not divide into nodes, and for other ones than the capture's.
    """
    answer = demand.estimate
    for option, asked, known in (
        ("--world-size", world, answer.world_size),
        ("--gpus-per-node", per_node, answer.host_processes if answer.world_size else None),
    ):
        if asked is not None and known is not None and asked != known:
            raise UsageError(
                f"{option} {asked}, but the answer is of {known}", f"leave {option} out"
            )
    size = answer.world_size or world or answer.host_processes
    local = per_node or min(answer.host_processes, size)
    if size % local or local % answer.card_processes:
        smaller = range(local - local % answer.card_processes, 0, -answer.card_processes)
        even = [f"--gpus-per-node {one}" for one in smaller if size % one == 0]
        raise UsageError(
            f"{size} processes do not divide into nodes of {local} "
            f"with {answer.card_processes} on each GPU",
            " or ".join([*even[:1], "another --world-size"]),
        )
    if named is not None and named.capability != demand.seen.capability:
        raise UsageError(
            f"captured for {demand.seen.name}, of compute capability "
            f"{demand.seen.capability_text}; {named.name} has {named.capability_text}, "
            "where other kernels run",
            f"memplan estimate --gpu {named.name} …, and place its answer",
        )
    cards = [named] if named else _cards_like(demand.seen)
    card = next(_holding(demand, [(card, None) for card in cards]), None)
    slices = [(part, name) for card in cards for name, part in slices_of(card).items()]
    slices.sort(key=lambda one: one[0].total_memory_bytes)
    mig = next(_holding(demand, slices), None) if size == answer.card_processes == 1 else None
    return Placement(
        memplan_version=__version__,
        fits=card is not None,
        card=card,
        mig=mig,
        captured_for=demand.seen.name,
        needed_bytes=answer.high_bytes * answer.card_processes,
        nodes=size // local,
        gpus_per_node=local // answer.card_processes,
        processes_per_node=local,
        host_bytes_per_node=_host_bytes(answer, local),
        command=list(answer.command),
        notes=[*demand.notes, *_notes(answer, demand.seen, card, mig, named)],
    )


def _cards_like(seen: DeviceProfile) -> list[DeviceProfile]:
    """Known cards with the same compute capability, the smallest first."""
    like = [card for card in known_profiles() if card.capability == seen.capability]
    return sorted(like, key=lambda card: (card.total_memory_bytes, card.name != seen.name))


def _holding(
    demand: Demand, candidates: Sequence[tuple[DeviceProfile, str | None]]
) -> Iterator[Slot]:
    for card, mig in candidates:
        needed, holds = demand.on(card)
        if holds:
            yield Slot(
                card=card.name,
                device_name=card.device_name,
                capability=card.capability_text,
                mig=mig,
                total_bytes=card.total_memory_bytes,
                needed_bytes=needed,
            )


def _host_bytes(answer: Estimate, local: int) -> int | None:
    if answer.host_node_high_bytes is not None and local == answer.host_processes:
        return answer.host_node_high_bytes
    return None if answer.host_high_bytes is None else answer.host_high_bytes * local


def _notes(
    answer: Estimate,
    seen: DeviceProfile,
    card: Slot | None,
    mig: Slot | None,
    named: DeviceProfile | None,
) -> Iterator[str]:
    if named is None:
        yield (
            f"cards of compute capability {seen.capability_text} alone were looked at, that of the "
            "capture; memplan sweep --gpu NAME,NAME … captures for others"
        )
    if card is not None and card.card != seen.name:
        yield (
            f"captured for {seen.name}: on {card.card} kernels may take other workspaces; "
            f"memplan estimate --gpu {card.card} settles it"
        )
    if mig is not None:
        yield (
            f"a MIG slice has fewer multiprocessors than {seen.name}, and kernels may take other "
            "workspaces there"
        )
    if answer.world_size and answer.world_size > 1 and not answer.ranks:
        yield f"rank {answer.rank} alone was captured; --rank all captures those that can differ"
    if answer.host_high_bytes is None:
        yield "the capture did not follow the host's memory: host RAM is not asked for"
