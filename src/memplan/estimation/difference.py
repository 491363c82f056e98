"""What makes one estimate's peak higher than another's: by category, by module and by source line.

Both peaks are split the same way: what tensors asked for goes to the module and the line that made
them, what the allocator holds beyond that is fragmentation, and the rest is outside PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from msgspec.structs import replace

from memplan import __version__
from memplan.types.difference import Attributed, ChangedPart, ComparedPeak, Difference
from memplan.types.estimate import Estimate, HeldPart

ALIKE = 0.2
"""Two jobs are related if modules or lines that both have hold this share of their bytes."""
_DERIVED = ("", "unknown", "temporary", "activation")
"""Roles that are told by lifetimes alone, or not at all."""


def difference(
    before: Estimate, after: Estimate, files: tuple[str, str] = ("before", "after")
) -> Difference:
    """What changed from one peak to another. `files` name the two for a person."""
    held = _located(before, after)
    categories = _changes(dict(before.breakdown.items()), dict(after.breakdown.items()))
    modules = _changes(
        *(_places(e, h, _module) for e, h in zip((before, after), held, strict=True))
    )
    sources = _changes(
        *(_places(e, h, _source) for e, h in zip((before, after), held, strict=True))
    )
    change = after.peak_bytes - before.peak_bytes
    related = _related(before, after, held)
    return Difference(
        memplan_version=__version__,
        before=_side(before, files[0]),
        after=_side(after, files[1]),
        change_bytes=change,
        related=related,
        categories=categories,
        modules=modules,
        sources=sources,
        attributed=Attributed(
            categories=_attributed(categories, change),
            modules=_attributed(modules, change),
            sources=_attributed(sources, change),
        ),
        notes=list(_notes(before, after, files, related)),
    )


def _side(answer: Estimate, file: str) -> ComparedPeak:
    return ComparedPeak(
        file=file,
        command=answer.command,
        peak_bytes=answer.peak_bytes,
        low_bytes=answer.low_bytes,
        high_bytes=answer.high_bytes,
        fits=answer.fits,
    )


def _module(part: HeldPart) -> str:
    return part.module or _unplaced(part, "outside modules")


def _source(part: HeldPart) -> str:
    return part.source or _unplaced(part, "no source line")


def _unplaced(part: HeldPart, why: str) -> str:
    """What is known of a part that is outside modules, or that no line made; empty for nothing."""
    known = part.module or part.source or part.role not in _DERIVED
    return f"({why}: {part.role.replace('_', ' ')})" if known else ""


def _places(
    answer: Estimate, held: list[HeldPart], place: Callable[[HeldPart], str]
) -> dict[str, int]:
    """Bytes of the whole peak by place."""
    sums: Counter[str] = Counter()
    for part in held:
        sums[place(part)] += part.bytes
    broken = answer.breakdown
    sums["(fragmentation)"] += broken.fragmentation
    sums["(context)"] += broken.context
    # What the rows do not name: all of it in an answer without rows, else what NCCL holds.
    sums["" if not held else "(NCCL)"] += broken.total() - sums.total()
    return dict(sums)


def _changes(before: dict[str, int], after: dict[str, int]) -> list[ChangedPart]:
    names = dict.fromkeys((*before, *after))
    parts = [(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return [
        ChangedPart(name=name, before_bytes=old, after_bytes=new, change_bytes=new - old)
        for name, old, new in sorted(parts, key=lambda part: (-abs(part[2] - part[1]), part[0]))
        if old or new
    ]


def _attributed(parts: Iterable[ChangedPart], change: int) -> float:
    missed = sum(abs(part.change_bytes) for part in parts if not part.name)
    return max(0.0, 1.0 - missed / max(abs(change), 1)) if missed else 1.0


def _located(before: Estimate, after: Estimate) -> tuple[list[HeldPart], list[HeldPart]]:
    """What the two hold, with the files of both named alike: the job may lie in another folder, or
    have been started from another one. Files are paired by as much of the ends of their paths as
    tells them apart."""
    sides = (before.held, after.held)
    files = [{_file(part) for part in held} - {""} for held in sides]
    own, others = files[0] - files[1], files[1] - files[0]
    names: list[dict[str, str]] = [{}, {}]
    for file in own:
        other = _nearest(file, others)
        if other and _nearest(other, own) == file:
            names[0][file] = names[1][other] = "/".join(_common_end(file, other))
    old, new = (
        [replace(part, source=named.get(_file(part), _file(part)) + _line(part)) for part in held]
        for held, named in zip(sides, names, strict=True)
    )
    return old, new


def _nearest(file: str, others: set[str]) -> str:
    """The one whose path ends most like it; empty where none does, or several do."""
    ends = {other: len(_common_end(file, other)) for other in others}
    best = max(ends.values(), default=0)
    found = [other for other, length in ends.items() if length == best]
    return found[0] if best and len(found) == 1 else ""


def _file(part: HeldPart) -> str:
    return part.source.rpartition(":")[0]


def _line(part: HeldPart) -> str:
    return part.source.removeprefix(_file(part))


def _common_end(one: str, other: str) -> list[str]:
    """The last components that two paths have in common."""
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    same = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return same[::-1]


def _related(
    before: Estimate, after: Estimate, located: tuple[list[HeldPart], list[HeldPart]]
) -> bool | None:
    """Whether two jobs are related, by their modules, or by lines with their whole paths:
    `train.py:10` in two scripts is not the same line. Without modules, lines with short paths are
    compared."""
    shares = [
        _common_share(before.held, after.held, lambda part: part.module),
        _common_share(before.held, after.held, lambda part: part.source),
    ]
    if shares[0] is None:
        shares.append(_common_share(*located, lambda part: part.source))
    known = [share for share in shares if share is not None]
    return max(known) >= ALIKE if known else None


def _common_share(
    before: list[HeldPart], after: list[HeldPart], place: Callable[[HeldPart], str]
) -> float | None:
    """The share of bytes in places that both jobs have, of all bytes whose place is known. None
    where one of the jobs knows no place."""
    old, new = ({place(part) for part in held} - {""} for held in (before, after))
    if not old or not new:
        return None
    known = [(place(part), part.bytes) for part in (*before, *after) if place(part)]
    common = sum(nbytes for name, nbytes in known if name in old & new)
    return common / max(sum(nbytes for _, nbytes in known), 1)


def _notes(
    before: Estimate, after: Estimate, files: tuple[str, str], related: bool | None
) -> Iterator[str]:
    if related is False:
        yield (
            "These look like unrelated jobs: they have hardly a module or a source line in common, "
            "so the changes below are what one has and the other has not."
        )
    if related is None:
        yield "Whether the two are jobs alike cannot be told: one names no modules and no lines."
    cards = [answer.gpu.name if answer.gpu else "no card" for answer in (before, after)]
    if cards[0] != cards[1]:
        yield f"The answers are for different cards: {cards[0]}, {cards[1]}."
    for file, answer in zip(files, (before, after), strict=True):
        if not answer.held and answer.peak_bytes:
            yield (
                f"{file} does not say what modules and lines hold (an answer of an earlier "
                "version): estimate again for that."
            )
