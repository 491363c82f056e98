"""The plan file: JSON, so that people can read and diff it.

Files are untrusted: their size is bounded, every field is checked against its type, unknown fields
are refused, and nothing in a file is executed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from memplan.types.errors import FormatError, UsageError
from memplan.types.output_file import write_file
from memplan.types.plan import Plan

MAX_BYTES = 64 << 20
_SCHEMA_VERSION = 1


def save_plan(plan: Plan, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a plan; whole or not at all.

    Raises UsageError when `path` exists and `overwrite` is False, or cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"
    write_file(Path(path), [text], overwrite=overwrite)


def load_plan(path: Path | str) -> Plan:
    """Read a plan file.

    Raises UsageError when it cannot be read, FormatError when it is not a plan of this version.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}",
            "memplan fit -o job.plan SCRIPT writes a plan",
        ) from error
    if len(text) > MAX_BYTES:
        raise FormatError(f"{path} has more than {MAX_BYTES >> 20} MiB: not a plan of memplan")
    try:
        plan = msgspec.json.decode(text, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{path} is not a plan of memplan: {error}",
            "memplan fit -o job.plan SCRIPT writes a plan",
        ) from error
    _check(plan, path)
    return plan


def _check(plan: Plan, path: Path) -> None:
    if not plan.memplan_version:
        raise FormatError(
            f"{path} is not a plan of memplan: it does not say which memplan wrote it",
            "memplan fit -o job.plan SCRIPT writes a plan",
        )
    if plan.schema_version != _SCHEMA_VERSION:
        raise FormatError(
            f"{path} has plan version {plan.schema_version}; this memplan reads {_SCHEMA_VERSION}",
            "make the plan again with this memplan",
        )
    for name in plan.__struct_fields__:
        version = getattr(getattr(plan, name), "version", 1)
        if version != 1:
            raise FormatError(
                f"{path}: its {name} part has version {version}; this memplan reads 1",
                "make the plan again with this memplan",
            )
    if plan.allocation is not None:
        from memplan.types.allocation import check_allocation  # NumPy is slow to import

        try:
            check_allocation(plan.allocation)
        except FormatError as error:
            raise FormatError(
                f"{path}: {error.message}",
                error.hint or "copy it again, or make it again: memplan plan -o PLAN …",
            ) from error
