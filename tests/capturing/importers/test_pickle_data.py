from __future__ import annotations

import copyreg
import io
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.importers import pickle_data
from memplan.capturing.importers.pickle_data import read_pickle, unpickle
from memplan.types.errors import FormatError, UsageError

several = settings(max_examples=150, deadline=None)

keys = st.one_of(st.text(max_size=6), st.integers(-(1 << 100), 1 << 100), st.none(), st.booleans())
plain = st.recursive(
    st.one_of(
        keys, st.binary(max_size=6), st.floats(allow_nan=False), st.text(min_size=300, max_size=300)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.tuples(inner, inner, inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.frozensets(keys, max_size=3),
        st.sets(keys, max_size=3),
    ),
    max_leaves=20,
)
ran: list[str] = []
"""What a hostile pickle would have run."""


def boom(*_: object) -> str:
    """The payload: whoever calls it leaves a trace."""
    ran.append("boom")
    return "boom"


class Hostile:
    """Reduces to a call of `boom`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return boom, ()


@several
@given(plain, st.integers(0, 5))
def test_plain_data_of_every_protocol(value: Any, protocol: int) -> None:
    if protocol < 4 and contains(value, (set, frozenset, bytes)):
        return  # older protocols have no instruction for these and call a class instead
    assert unpickle(pickle.dumps(value, protocol)) == value


def contains(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, kinds):
        return True
    if isinstance(value, dict):
        return any(contains(part, kinds) for part in value.values())
    return isinstance(value, list | tuple) and any(contains(part, kinds) for part in value)


def test_shared_and_recursive_values_stay_shared() -> None:
    inner: list[Any] = []
    outer: dict[str, Any] = {"a": inner, "b": inner}
    inner.append(outer)
    read = unpickle(pickle.dumps(outer))
    assert read["a"] is read["b"]
    assert read["a"][0] is read


def test_more_than_256_memo_entries_and_large_batches() -> None:
    words = [f"word {i}" for i in range(3000)]
    value = [words, [dict.fromkeys(words[i : i + 3], words[i]) for i in range(2000)]]
    for protocol in (2, 4):
        assert unpickle(pickle.dumps(value, protocol)) == value


GLOBAL = b"ctests.capturing.importers.test_pickle_data\nboom\n"
HOSTILE = {
    "REDUCE": b"\x80\x04" + GLOBAL + b")R.",
    "GLOBAL": b"\x80\x02cos\nsystem\n.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "INST": b"(S'id'\nios\nsystem\n.",
    "OBJ": b"(" + GLOBAL + b"o.",
    "NEWOBJ": b"\x80\x02" + GLOBAL + b")\x81.",
    "NEWOBJ_EX": b"\x80\x04" + GLOBAL + b")}\x92.",
    "EXT1": b"\x80\x02\x82\x01)R.",
    "EXT2": b"\x80\x02\x83\x01\x00)R.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00)R.",
    "PERSID": b"Pname\n.",
    "BINPERSID": b"\x80\x02K\x01Q.",
    "BUILD": b"\x80\x02}}b.",
    "REDUCE of text": b"\x80\x02\x8c\x02id)R.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_run_code_is_refused(name: str) -> None:
    modules = set(sys.modules)
    ran.clear()
    with pytest.raises(FormatError, match=r"evil\.pickle") as caught:
        unpickle(HOSTILE[name], "evil.pickle")
    assert caught.value.hint
    assert not ran
    assert set(sys.modules) == modules


def test_a_name_that_is_looked_up_is_said() -> None:
    with pytest.raises(FormatError, match=r"os\.system is more than plain data; nothing was run"):
        unpickle(HOSTILE["GLOBAL"])


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickled_call_does_not_run(protocol: int) -> None:
    content = pickle.dumps({"segments": [Hostile()]}, protocol)
    ran.clear()
    with pytest.raises(FormatError):
        unpickle(content)
    assert not ran
    pickle.loads(content)
    assert ran  # the payload is live: Python's own unpickler runs it


def test_a_registered_and_cached_extension_is_refused() -> None:
    copyreg.add_extension(__name__, "boom", 0x1234)
    cache: dict[int, object] = copyreg._extension_cache  # type: ignore[attr-defined]
    cache[0x1234] = boom
    ran.clear()
    try:
        with pytest.raises(FormatError, match=r"test_pickle_data\.boom is more than plain data"):
            unpickle(b"\x80\x02\x83\x34\x12)R.")
    finally:
        copyreg.remove_extension(__name__, "boom", 0x1234)
        cache.pop(0x1234, None)
    assert not ran


BROKEN = {
    "empty": b"",
    "no stop": b"\x80\x04}",
    "stop on nothing": b".",
    "unknown code": b"\x80\x04\xff.",
    "newer protocol": b"\x80\x09}.",
    "huge text": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"ab.",
    "huge bytes": b"\x80\x04\x8e" + (1 << 63).to_bytes(8, "little") + b"ab.",
    "huge integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "negative integer length": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "cut integer": b"\x80\x02\x8a\x08\x01\x02",
    "long decimal": b"I" + b"9" * 5000 + b"\n.",
    "huge decimal": b"I" + b"9" * 1000 + b"x\n.",
    "memo that was never put": b"\x80\x02h\x07.",
    "long memo that was never put": b"\x80\x02j\x07\x00\x00\x01.",
    "cut in a memo": b"\x80\x02j\x07\x00",
    "cut frame": b"\x80\x04\x95\x01",
    "pop of a mark that is not there": b"1.",
    "append to a dict": b"}K\x01a.",
    "items of a list": b"](K\x01K\x02u.",
    "odd items": b"}(K\x01u.",
    "list as a key": b"}]K\x01s.",
    "add to a list": b"](K\x01\x90.",
    "tuple of too few": b"\x80\x02K\x01\x87.",
    "text that is not UTF-8": b"\x80\x04\x8c\x01\xff.",
    "memo text": b"]px\n.",
    "float": b"Fone\n.",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pickles_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="cannot be read as plain pickled data"):
        unpickle(BROKEN[name])


def test_a_memo_of_64_gib_is_refused() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(FormatError, match="MemoryError"):
        unpickle(b"\x80\x02]r\xff\xff\xff\xff.")
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_deep_nesting_does_not_overflow() -> None:
    depth = 300_000
    value = unpickle(b"]" * depth + b"a" * (depth - 1) + b".")
    levels = 0
    while value:
        value, levels = value[0], levels + 1
    assert levels == depth - 1


@several
@given(st.binary(max_size=60), st.integers(0, 80), st.integers(0, 255))
def test_noise_is_read_or_refused(noise: bytes, at: int, value: int) -> None:
    content = bytearray(pickle.dumps({"a": [1, (2.5, "x"), {"b": None}], "c": 1 << 40}, 4))
    content[at % len(content)] = value
    for candidate in (noise, bytes(content), bytes(content[: at % len(content)])):
        try:
            unpickle(candidate)
        except FormatError as error:
            assert error.hint


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.pickle"
    with pytest.raises(UsageError, match="cannot be read"):
        read_pickle(path)
    buffer = io.BytesIO()
    pickle.dump([1, 2], buffer)
    path.write_bytes(buffer.getvalue())
    assert read_pickle(path) == ([1, 2], len(buffer.getvalue()))
    monkeypatch.setattr(pickle_data, "MAX_FILE_BYTES", 3)
    with pytest.raises(FormatError, match="at most 3 are read"):
        read_pickle(path)
