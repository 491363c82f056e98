"""The largest tensors at the peak, as rows of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.text import Text

from memplan.report.text import clean, cut_middle, format_bytes, short_op, wrap_name
from memplan.types.estimate import TensorInfo

_LONGEST_DESCRIPTION = 34
_NARROWEST = 24
_MOST_LINES = 6
_ROLES = {
    "gathered_parameter": "gathered parameter (FSDP all-gather)",
    "communication": "buffer of a collective",
}


def largest_lines(tensors: list[TensorInfo], width: int) -> Iterator[Text]:
    """Rows of size, shape, dtype, name and source line; tensors that read alike share one.

    What does not fit beside the shape goes on below it: a name's beginning says as much as its end
    (`blocks.0.mlp` and `blocks.1.mlp`, `log_softmax` and `softmax`).
    """
    sources = _short_sources(tensors)
    rows: Counter[tuple[str, str, str, str]] = Counter()
    for tensor in tensors:
        rows[_row(tensor, sources[tensor.source])] += tensor.count
    what = min(max(len(description) for _, description, _, _ in rows), _LONGEST_DESCRIPTION)
    sizes = [f"{count} x {row[0]}" if count > 1 else row[0] for row, count in rows.items()]
    longest = max(map(len, sizes))
    margin = " " * (2 + longest + 2 + what + 2)
    room = max(width - len(margin), _NARROWEST)
    for size, (_, description, origin, source) in zip(sizes, rows, strict=True):
        first, *rest = _wrapped(origin, source, room)
        shape = cut_middle(description, what)
        yield Text(f"  {size:>{longest}}  {shape:<{what}}  {first}".rstrip())
        for line in rest:
            yield Text(margin + line, style="dim")


def _row(tensor: TensorInfo, source: str) -> tuple[str, str, str, str]:
    """Size, shape and dtype, origin, source line."""
    description = " ".join(filter(None, (tensor.shape, tensor.dtype)))
    maker = tensor.name or " in ".join(filter(None, (short_op(tensor.op), tensor.module)))
    role = _ROLES.get(tensor.role, tensor.role.replace("_", " "))
    return (
        format_bytes(tensor.bytes),
        clean(description),
        clean(maker if maker.endswith(role) else f"{maker}, {role}".lstrip(", ")),
        clean(source),
    )


def _wrapped(origin: str, source: str, room: int) -> list[str]:
    """Origin and source within `room` characters a line; a source stays whole where it can."""
    if len(origin) + 2 + len(source) <= room:
        return [f"{origin}  {source}".rstrip()]
    lines = wrap_name(origin, room)
    if len(lines) > _MOST_LINES:
        lines = wrap_name(cut_middle(origin, _MOST_LINES * room * 3 // 4), room)
    if source and len(lines[-1]) + 2 + len(source) <= room:
        return [*lines[:-1], f"{lines[-1]}  {source}"]
    return [*lines, *([cut_middle(source, room)] if source else [])]


def _short_sources(tensors: list[TensorInfo]) -> dict[str, str]:
    """Each source line by its file's name, and its folder's where files of one name differ."""
    paths = {tensor.source: tensor.source.split("/") for tensor in tensors}
    files: dict[str, set[str]] = {}
    for source, parts in paths.items():
        files.setdefault(parts[-1].rpartition(":")[0], set()).add(source.rpartition(":")[0])
    return {
        source: "/".join(
            parts[-1:] if len(files[parts[-1].rpartition(":")[0]]) == 1 else parts[-2:]
        )
        for source, parts in paths.items()
    }
