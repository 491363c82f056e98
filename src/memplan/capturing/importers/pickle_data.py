"""Reads pickles of plain data (dict, list, tuple, set, str, bytes, numbers, None), and no others.

PyTorch's memory snapshots are pickles. Python's unpickler is a small machine that can import and
call anything; forbidding imports alone still leaves it sizes that the file chooses (its memo can be
made to take 64 GiB by ten bytes) and objects registered elsewhere in the process. This one knows
only the instructions that build plain data: none of them looks a name up, calls, or recurses, and
memory grows with the file alone.

The instructions are those of Lib/pickletools.py, protocols 0 to 5.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from memplan.types.collection import paused_collection
from memplan.types.errors import FormatError, UsageError

MAX_FILE_BYTES = 2 << 30
_MAX_INTEGER_BYTES = 16
_HIGHEST_PROTOCOL = 5

_U2 = struct.Struct("<H")
_I4 = struct.Struct("<i")
_U4 = struct.Struct("<I")
_U8 = struct.Struct("<Q")
_F8 = struct.Struct(">d")
_BINGET, _LONG_BINGET, _MEMOIZE, _MARK, _STOP = 0x68, 0x6A, 0x94, 0x28, 0x2E
_BININT, _BININT1, _LONG1 = 0x4A, 0x4B, 0x8A
_LONG_BINGETS = re.compile(rb"(?:j.{4}){1,64}", re.DOTALL)
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


def read_pickle(path: Path) -> tuple[Any, int]:
    """The plain data that a pickle file holds, and the file's size in bytes: no list or dict in
    the data has more items than that.

    Raises FormatError when the file is too large, truncated, no pickle, or would build anything
    but plain data; UsageError when it cannot be read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise FormatError(
                f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read",
                "a snapshot with fewer entries: _record_memory_history(max_entries=…)",
            )
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", "check the name and its rights"
        ) from error
    return unpickle(content, str(path)), len(content)


def unpickle(content: bytes, where: str = "the pickle") -> Any:
    """The plain data in `content`. Raises FormatError, naming `where`."""
    machine = _Machine(content, where)
    try:
        with paused_collection():
            return machine.run()
    except (IndexError, KeyError, struct.error):
        machine.refuse("it ends early or its instructions do not fit together")
    except (TypeError, AttributeError, ValueError):
        machine.refuse("its instructions do not fit together")
    except MemoryError:
        machine.refuse("it does not fit in memory")


class _Machine:
    """The state of one reading: a stack of values, the stacks set aside at marks, and the memo."""

    def __init__(self, content: bytes, where: str) -> None:
        self.content = content
        self.where = where
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Carry out instructions up to STOP; returns what it leaves on top of the stack."""
        content, handlers, memo = self.content, _HANDLERS, self.memo
        at = 0
        while True:
            code = content[at]
            at += 1
            # The instructions that a snapshot mostly consists of are kept out of calls.
            if code == _BINGET:
                self.stack.append(memo[content[at]])
                at += 1
            elif code == _LONG_BINGET:
                run = _LONG_BINGETS.match(content, at - 1)
                if run is None:
                    self.refuse("it ends early")
                keys = struct.unpack("<" + "xI" * (len(run[0]) // 5), run[0])
                self.stack.extend(map(memo.__getitem__, keys))
                at = run.end()
            elif code == _MEMOIZE:
                memo[len(memo)] = self.stack[-1]
            elif code == _LONG1:
                end = at + 1 + content[at]
                if content[at] > _MAX_INTEGER_BYTES:
                    self.refuse(f"an integer of {content[at]} bytes")
                self.stack.append(int.from_bytes(content[at + 1 : end], "little", signed=True))
                at = end
            elif code == _BININT:
                self.stack.append(_I4.unpack_from(content, at)[0])
                at += 4
            elif code == _MARK:
                self.marks.append(self.stack)
                self.stack = []
            elif code == _BININT1:
                self.stack.append(content[at])
                at += 1
            elif code == _STOP:
                return self.stack.pop()
            else:
                self.at = at
                handler = handlers.get(code)
                if handler is None:
                    self._refuse_instruction(code)
                handler(self)
                at = self.at

    def refuse(self, why: str) -> NoReturn:
        """Raise FormatError with the place that was reached."""
        raise FormatError(
            f"{self.where} cannot be read as plain pickled data (byte {self.at}): {why}",
            "a snapshot written by torch.cuda.memory._dump_snapshot(FILE)",
        )

    def _refuse_instruction(self, code: int) -> NoReturn:
        name = _NAMES.get(code)
        if name is None:
            self.refuse(f"{code:#04x} is no pickle instruction")
        self.refuse(f"{name} would build more than plain data; nothing was run")

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.at + count
        if end > len(self.content):
            self.refuse("it ends early")
        piece = self.content[self.at : end]
        self.at = end
        return piece

    def number(self, form: struct.Struct) -> Any:
        """The next fixed-width number."""
        (value,) = form.unpack_from(self.content, self.at)
        self.at += form.size
        return value

    def line(self) -> bytes:
        """The text up to the next line feed, which is skipped."""
        end = self.content.find(b"\n", self.at, self.at + 1024)
        if end < 0:
            self.refuse("a line of text does not end")
        return self.take(end + 1 - self.at)[:-1]

    def to_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def store(self, into: dict[Any, Any], items: list[Any]) -> None:
        """Put alternating keys and values into a dict; only keys whose hash costs nothing."""
        if type(into) is not dict or len(items) % 2:
            self.refuse("its instructions do not fit together")
        keys = items[::2]
        if not _plain_keys(keys):
            self.refuse("a key is neither text nor a number")
        into.update(zip(keys, items[1::2], strict=True))


_KEY_TYPES = frozenset({str, int, bool, bytes, float, type(None)})


def _plain_keys(items: list[Any]) -> bool:
    """Hashing a tuple recurses as deep as the file likes; these do not."""
    return _KEY_TYPES.issuperset(map(type, items))


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _push_number(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.number(form))


def _push_text(m: _Machine, length: int) -> None:
    m.stack.append(_printable(m.take(length).decode("utf-8", "surrogatepass")))


def _text_line(m: _Machine) -> None:
    m.stack.append(_printable(m.line().decode("raw-unicode-escape")))


def _printable(text: str) -> str:
    """A file name that was no UTF-8 holds halves of characters, which no output takes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _push_bytes(m: _Machine, length: int) -> None:
    m.stack.append(m.take(length))


def _push_integer(m: _Machine, length: int) -> None:
    if not 0 <= length <= _MAX_INTEGER_BYTES:
        m.refuse(f"an integer of {length} bytes")
    m.stack.append(int.from_bytes(m.take(length), "little", signed=True))


def _integer_line(m: _Machine) -> None:
    text = m.line().removesuffix(b"L")
    if text in (b"00", b"01"):  # protocol 0 writes booleans so
        m.stack.append(text == b"01")
    else:
        m.stack.append(int(text))


def _dict(m: _Machine) -> None:
    items = m.to_mark()
    built: dict[Any, Any] = {}
    m.store(built, items)
    m.stack.append(built)


def _list(m: _Machine) -> None:
    items = m.to_mark()
    m.stack.append(items)


def _tuple(m: _Machine) -> None:
    items = m.to_mark()
    m.stack.append(tuple(items))


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.store(m.stack[-1], [key, value])


def _set_items(m: _Machine) -> None:
    items = m.to_mark()
    m.store(m.stack[-1], items)


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    _list_on_top(m).append(value)


def _appends(m: _Machine) -> None:
    items = m.to_mark()
    _list_on_top(m).extend(items)


def _list_on_top(m: _Machine) -> list[Any]:
    top = m.stack[-1]
    if type(top) is not list:
        m.refuse("its instructions do not fit together")
    return top


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.to_mark()


def _add_items(m: _Machine) -> None:
    items = m.to_mark()
    top = m.stack[-1]
    if type(top) is not set or not _plain_keys(items):
        m.refuse("its instructions do not fit together")
    top.update(items)


def _frozen_set(m: _Machine) -> None:
    items = m.to_mark()
    if not _plain_keys(items):
        m.refuse("a set of something that is neither text nor a number")
    m.stack.append(frozenset(items))


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def build(m: _Machine) -> None:
        if len(m.stack) < count:
            m.refuse("its instructions do not fit together")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return build


def _protocol(m: _Machine) -> None:
    protocol = m.take(1)[0]
    if protocol > _HIGHEST_PROTOCOL:
        m.refuse(f"protocol {protocol} is newer than {_HIGHEST_PROTOCOL}")


def _put(m: _Machine, key: int) -> None:
    m.memo[key] = m.stack[-1]


def _get(m: _Machine, key: int) -> None:
    m.stack.append(m.memo[key])


def _memo_key(m: _Machine) -> int:
    return int(m.line())


_HANDLERS: dict[int, Callable[[_Machine], Any]] = {
    ord("}"): lambda m: m.stack.append({}),
    ord("]"): lambda m: m.stack.append([]),
    ord(")"): _push(()),
    0x8F: lambda m: m.stack.append(set()),
    ord("u"): _set_items,
    ord("s"): _set_item,
    ord("e"): _appends,
    ord("a"): _append,
    0x90: _add_items,
    0x91: _frozen_set,
    ord("d"): _dict,
    ord("l"): _list,
    ord("t"): _tuple,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("M"): _push_number(_U2),
    0x8B: lambda m: _push_integer(m, m.number(_I4)),
    ord("G"): _push_number(_F8),
    ord("I"): _integer_line,
    ord("L"): _integer_line,
    ord("F"): lambda m: m.stack.append(float(m.line())),
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    0x8C: lambda m: _push_text(m, m.take(1)[0]),
    ord("X"): lambda m: _push_text(m, m.number(_U4)),
    0x8D: lambda m: _push_text(m, m.number(_U8)),
    ord("V"): _text_line,
    ord("C"): lambda m: _push_bytes(m, m.take(1)[0]),
    ord("B"): lambda m: _push_bytes(m, m.number(_U4)),
    0x8E: lambda m: _push_bytes(m, m.number(_U8)),
    ord("q"): lambda m: _put(m, m.take(1)[0]),
    ord("r"): lambda m: _put(m, m.number(_U4)),
    ord("p"): lambda m: _put(m, _memo_key(m)),
    ord("g"): lambda m: _get(m, _memo_key(m)),
    ord("0"): _pop,
    ord("1"): lambda m: m.to_mark(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    0x80: _protocol,
    0x95: lambda m: m.take(8),
}
"""Instruction code → what it does. What is not here is refused by name."""
