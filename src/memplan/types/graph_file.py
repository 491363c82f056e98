"""The graph file: a `Graph` as JSON Lines, so that a fault has a line. `docs/order.md` describes
it.

Files are untrusted: sizes are bounded, nothing in them chooses a type, and what contradicts itself
is refused with the first line that shows it.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from memplan.types.errors import FormatError, UsageError
from memplan.types.graph import Graph, csr

VERSION = 1
MAX_FILE_BYTES = 512 << 20
MAX_OPERATORS = 1_000_000
MAX_VALUES = 4_000_000
MAX_TOTAL_BYTES = 1 << 60
"""The most bytes of everything in the graph together."""
_LONGEST_NAME = 1000
_SHOWN = 60

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOTAL_BYTES)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST_NAME)]
_Text = Annotated[str, msgspec.Meta(max_length=_LONGEST_NAME)]
_T = TypeVar("_T")


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    memplan_graph: int
    base_bytes: _Bytes = 0
    operators: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Value(msgspec.Struct, forbid_unknown_fields=True):
    value: _Name
    bytes: _Bytes
    lasts: bool = False


class _Operator(msgspec.Struct, forbid_unknown_fields=True):
    op: _Text
    id: _Text = ""
    source: _Text = ""
    scratch: _Bytes = 0
    makes: dict[_Name, _Bytes] = {}
    lasts: list[_Name] = []
    uses: list[_Name] = []
    after: list[_Name] = []


def load_graph(path: Path | str) -> Graph:
    """Read a graph.

    Raises UsageError when the file cannot be read, FormatError with the line, the operator or value
    and the reason when it is no graph.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise FormatError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB", "a smaller graph")
    reader = _Reader(path)
    reader.read(content)
    return reader.graph()


@dataclass(frozen=True)
class _Made:
    """The origin of a value: its line, and the operator, or -1."""

    line: int
    maker: int
    bytes: int
    lasts: bool


@dataclass
class _Reader:
    path: Path
    base_bytes: int = 0
    operators: list[_Operator] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    """The line of each operator."""
    values: dict[str, _Made] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    total_bytes: int = 0

    def read(self, content: bytes) -> None:
        header: _Header | None = None
        last = 0
        for number, line in enumerate(content.removeprefix(BOM_UTF8).split(b"\n"), 1):
            if not line.strip():
                continue
            last = number
            row = self._object(number, line)
            if header is None:
                header = self._header(number, row)
            elif "op" in row:
                self._add_operator(number, self._as(number, row, _Operator))
            elif "value" in row:
                self._add_value(number, self._as(number, row, _Value))
            else:
                raise self._fault(number, "neither an operator (op) nor a value (value)")
        if header is None:
            raise FormatError(f"{self.path} is empty", _FORMAT)
        if header.operators is not None and header.operators != len(self.operators):
            count = f"{len(self.operators)} operators and not {header.operators}"
            raise self._fault(
                last,
                f"{count}, as the first line says",
                "the file was cut off, or its first line is wrong",
            )

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._fault(number, f"not JSON: {error}; is the file cut off?") from error
        if not isinstance(row, dict):
            raise self._fault(number, "not a JSON object")
        return row

    def _header(self, number: int, row: dict[str, Any]) -> _Header:
        if "memplan_graph" not in row:
            raise self._fault(number, "the first line does not say memplan_graph")
        header = self._as(number, row, _Header)
        if header.memplan_graph != VERSION:
            raise self._fault(
                number,
                f"version {header.memplan_graph} of the format; this memplan reads {VERSION}",
            )
        self.base_bytes = header.base_bytes
        self._count(number, header.base_bytes)
        return header

    def _as(self, number: int, row: dict[str, Any], kind: type[_T]) -> _T:
        try:
            return msgspec.convert(row, kind)
        except msgspec.ValidationError as error:
            named = row.get("op") or row.get("value") or ""
            of = f"{_shown(named)}: " if isinstance(named, str) and named else ""
            raise self._fault(number, f"{of}{_wrong_size(row) or error}") from error

    def _count(self, number: int, nbytes: int) -> None:
        self.total_bytes += nbytes
        if self.total_bytes > MAX_TOTAL_BYTES:
            raise self._fault(number, f"more than {MAX_TOTAL_BYTES} bytes together")

    def _add_value(self, number: int, value: _Value) -> None:
        self._declare(value.value, _Made(number, -1, value.bytes, value.lasts))

    def _declare(self, name: str, made: _Made) -> None:
        if name in self.values:
            raise self._fault(
                made.line, f"value {_shown(name)} is there already: line {self.values[name].line}"
            )
        if len(self.values) >= MAX_VALUES:
            raise self._fault(made.line, f"more than {MAX_VALUES} values")
        self._count(made.line, made.bytes)
        self.values[name] = made

    def _add_operator(self, number: int, operator: _Operator) -> None:
        row = len(self.operators)
        if row >= MAX_OPERATORS:
            raise self._fault(number, f"more than {MAX_OPERATORS} operators")
        what = f"operator {_shown(operator.op)}"
        if operator.id:
            if operator.id in self.ids:
                first = self.lines[self.ids[operator.id]]
                raise self._fault(
                    number, f"id {_shown(operator.id)} is there already: line {first}"
                )
            self.ids[operator.id] = row
        for name in operator.lasts:
            if name not in operator.makes:
                raise self._fault(number, f"{what} does not make {_shown(name)}, which is to last")
        for name in operator.uses:
            if name in operator.makes:
                raise self._fault(number, f"{what} uses {_shown(name)}, which it makes itself")
        self._count(number, operator.scratch)
        for name, nbytes in operator.makes.items():
            self._declare(name, _Made(number, row, nbytes, name in operator.lasts))
        self.operators.append(operator)
        self.lines.append(number)

    def graph(self) -> Graph:
        needs = [self._needs(row) for row in range(len(self.operators))]
        for row, needed in enumerate(needs):
            if needed and max(needed) >= row:
                later = max(needed)
                raise self._fault(
                    self.lines[row],
                    f"operator {_shown(self.operators[row].op)} needs "
                    f"{_shown(self.operators[later].op)} of line {self.lines[later]}",
                    "operators come in the order of the program",
                )
        number_of = {name: number for number, name in enumerate(self.values)}
        users: list[set[int]] = [set() for _ in self.values]
        for row, operator in enumerate(self.operators):
            for name in operator.uses:
                users[number_of[name]].add(row)
        before_start, before = csr(needs)
        users_start, users_rows = csr(users)
        graph = Graph(
            name=[operator.op for operator in self.operators],
            scratch=np.array([operator.scratch for operator in self.operators], np.int64),
            before_start=before_start,
            before=before,
            bytes=np.array([made.bytes for made in self.values.values()], np.int64),
            maker=np.array([made.maker for made in self.values.values()], np.int64),
            lasts=np.array([made.lasts for made in self.values.values()], np.bool_),
            users_start=users_start,
            users=users_rows,
            base_bytes=self.base_bytes,
            value_name=list(self.values),
        )
        graph.check()
        return graph

    def _needs(self, row: int) -> set[int]:
        operator, line = self.operators[row], self.lines[row]
        what = f"operator {_shown(operator.op)}"
        needed = set()
        for name in operator.uses:
            if name not in self.values:
                raise self._fault(line, f"{what} uses {_shown(name)}, which nothing makes")
            needed.add(self.values[name].maker)
        for name in operator.after:
            if name not in self.ids:
                raise self._fault(line, f"{what} is to run after {_shown(name)}: no such id")
            needed.add(self.ids[name])
        return needed - {-1}

    def _fault(self, line: int, why: str, hint: str = "") -> FormatError:
        return FormatError(f"{self.path}, line {line}: {why}", hint or _FORMAT)


_FORMAT = 'a graph file as docs/order.md describes it: {"memplan_graph": 1} and a line an operator'


def _wrong_size(row: dict[str, Any]) -> str:
    """Which value has bytes that are none; msgspec does not name the keys of a mapping."""
    makes = row.get("makes")
    for name, nbytes in makes.items() if isinstance(makes, dict) else ():
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_TOTAL_BYTES:
            return f"the bytes of {_shown(name)} are not a whole number from 0 to 2^60"
    return ""


def _shown(name: str) -> str:
    """A name as in the file, in quotes and shortened."""
    return json.dumps(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…", ensure_ascii=False)
