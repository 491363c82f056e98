"""What `limit_gpu_memory` holds a test to, and what a failure says: the limit, and what grew since
the baseline that was committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from memplan.report.text import format_bytes, headline, short_op
from memplan.types.device import find_profile, parse_size
from memplan.types.errors import FormatError, UsageError
from memplan.types.estimate import Estimate, TensorInfo

_MOST_SHOWN = 8


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a baseline keeps of one test's estimate."""

    gpu: str | None
    peak_bytes: int
    high_bytes: int
    largest: list[TensorInfo]


class Baseline(msgspec.Struct, kw_only=True):
    """The committed file: estimates by the tests' names."""

    schema_version: int = 1
    tests: dict[str, Entry] = {}


def limit_bytes(limit: str | int | None, gpu: str | None) -> int:
    """The limit of a marker. Raises UsageError for one that is none."""
    if limit is not None:
        return limit if isinstance(limit, int) else parse_size(limit)
    if gpu is None:
        raise UsageError(
            "limit_gpu_memory has neither a limit nor a card",
            'limit_gpu_memory("20 GiB"), or limit_gpu_memory(gpu="rtx4090")',
        )
    return find_profile(gpu).total_memory_bytes


def entry_of(estimate: Estimate) -> Entry:
    gpu = estimate.gpu.name if estimate.gpu else None
    return Entry(
        gpu=gpu,
        peak_bytes=estimate.peak_bytes,
        high_bytes=estimate.high_bytes,
        largest=estimate.largest,
    )


def read_baseline(path: Path) -> Baseline:
    """The file's content; empty without a file. Raises FormatError for a damaged one."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError:
        return Baseline()
    except (OSError, msgspec.DecodeError) as error:
        raise FormatError(
            f"{path}: {error}", "remove it; pytest --memplan-update writes it anew"
        ) from error
    if found.schema_version != 1:
        raise FormatError(
            f"{path} is of version {found.schema_version}",
            "a newer memplan, or remove it and pytest --memplan-update",
        )
    return found


def write_baseline(path: Path, tests: dict[str, Entry]) -> None:
    """`tests` in the order of their names, one field a line, so that a change of one is seen."""
    content = msgspec.json.encode(Baseline(tests=dict(sorted(tests.items()))))
    path.write_bytes(msgspec.json.format(content, indent=1) + b"\n")


def complaint(estimate: Estimate, limit: int, before: Entry | None, baseline: str) -> str:
    """Empty where the high bound is within `limit` bytes and the card; else the figures, and what
    grew since `before`, this test's entry in the file named `baseline`."""
    over = estimate.high_bytes - limit
    if over <= 0 and estimate.fits is not False:
        return ""
    kept = f"limit {format_bytes(limit)}: exceeded by up to {format_bytes(over)}"
    if over <= 0:
        kept = "within its limit, but not within the card"
    return "\n".join([headline(estimate), kept, *_why(estimate, before, baseline)])


def _why(estimate: Estimate, before: Entry | None, baseline: str) -> Iterator[str]:
    if before is None:
        yield f"largest at the peak (no baseline of this test in {baseline}: --memplan-update):"
        yield from (f"  {_size(tensor)}  {_words(tensor)}" for tensor in estimate.largest)
        return
    on = f" on {before.gpu}" if before.gpu else ""
    high = format_bytes(before.high_bytes)
    yield f"in {baseline}: peak {format_bytes(before.peak_bytes)}, at most {high}{on}"
    grown = list(_grown(estimate.largest, before.largest))
    yield "grown since then:" if grown else "none of the largest tensors has grown since then"
    yield from grown[:_MOST_SHOWN]


def _grown(now: list[TensorInfo], then: list[TensorInfo]) -> Iterator[str]:
    """What holds more than it did, what grew most first.

    Only the largest groups of either are known: one that is new among them held at most what the
    least of the others did.
    """
    was: dict[tuple[str, ...], int] = {}
    for tensor in then:
        was[_key(tensor)] = was.get(_key(tensor), 0) + tensor.bytes * tensor.count
    is_now: dict[tuple[str, ...], list[TensorInfo]] = {}
    for tensor in now:
        is_now.setdefault(_key(tensor), []).append(tensor)
    rows = []
    for key, tensors in is_now.items():
        held = sum(tensor.bytes * tensor.count for tensor in tensors)
        more = held - was.get(key, 0)
        if more > 0:
            said = f"was {format_bytes(was[key])}" if key in was else "was not among the largest"
            rows.append((more, f"  +{format_bytes(more)}  {_words(tensors[0])} ({said})"))
    return (text for _, text in sorted(rows, key=lambda row: -row[0]))


def _key(tensor: TensorInfo) -> tuple[str, ...]:
    """What stays the same where sizes, and the lines above, change."""
    file = Path(tensor.source.rpartition(":")[0]).name  # its folder depends on where pytest began
    return tensor.role, tensor.name, tensor.op, tensor.module, file


def _size(tensor: TensorInfo) -> str:
    one = format_bytes(tensor.bytes)
    return f"{tensor.count} x {one}" if tensor.count > 1 else one


def _words(tensor: TensorInfo) -> str:
    made = tensor.name or " in ".join(filter(None, (short_op(tensor.op), tensor.module)))
    kind = tensor.role.replace("_", " ")
    what = " ".join(filter(None, (tensor.shape, tensor.dtype, kind, made)))
    return f"{what}  {tensor.source}".rstrip()
