"""The settings of PyTorch's CUDA caching allocator, in the syntax of `PYTORCH_ALLOC_CONF`.

Keys, defaults and validity rules are those of `c10/core/AllocatorConfig.cpp` and
`c10/cuda/CUDAAllocatorConfig.cpp` in torch 2.11 to 2.13. Where PyTorch accepts nonsense silently
(a missing comma, digits followed by letters) this parser refuses it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from memplan.types.errors import UsageError

MIB = 1 << 20
UNLIMITED = 2**63 - 1
"""Stands for "no limit" in sizes; larger than any device."""

ROUNDUP_INTERVALS = 16
"""One per power of two from 1 MiB up; the last one is open above."""

_ALIASES = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}


@dataclass(frozen=True)
class AllocatorSettings:
    """Allocator settings; sizes in bytes. The defaults are PyTorch's.

    Keys that change neither what the device's allocator hands out nor what the host's keeps
    (`pinned_num_register_threads` and others) are checked, and have no field.
    """

    expandable_segments: bool = False
    max_split_size: int = UNLIMITED
    """Blocks of this size or more are not split."""
    max_non_split_rounding: int = 20 * MIB
    """How much larger than the request an unsplittable block may be. Default: the large segment."""
    large_segment_size: int = 20 * MIB
    """Segment, or page of an expandable segment, for requests of 1 to 10 MiB."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed memory from which old cached blocks are given back; 0 is off."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    """Divisions for each power of two of request sizes, from 1 MiB; 0 and 1 are off."""
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    """Fail at once, without a retry, when the memory fraction would be exceeded."""
    backend: str = "native"
    pinned_max_round_threshold: int = UNLIMITED
    pinned_max_cached_size: int = UNLIMITED

    @classmethod
    def parse(cls, conf: str) -> AllocatorSettings:
        """Settings from a string such as `expandable_segments:True,max_split_size_mb:128`.

        Raises:
            UsageError: bad syntax, an unknown key or a value that PyTorch would refuse.
        """
        pairs = _split(conf)
        values: dict[str, Any] = {}
        # The large segment first: it is the lower limit and the default of others.
        for key, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
            read, field = _KEYS[key]
            values[field] = read(key, value, values)
        values.pop("", None)
        values.setdefault("max_non_split_rounding", values.get("large_segment_size", 20 * MIB))
        return cls(**values)


def _fail(message: str, hint: str = "") -> UsageError:
    return UsageError(f"allocator settings: {message}", hint)


def _split(conf: str) -> list[tuple[str, str]]:
    """Pairs of key and value text; brackets stay in the value."""
    text = re.sub(r"\s+", "", conf)
    pairs: list[tuple[str, str]] = []
    for part in _parts(text):
        key, colon, value = part.partition(":")
        key = _ALIASES.get(key, key)
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"keys: {', '.join(_KEYS)}"
            raise _fail(f"unknown key {key!r}", hint)
        if not colon or not value:
            raise _fail(f"{key} has no value", f"write {key}:VALUE")
        pairs.append((key, value))
    return pairs


def _parts(text: str) -> Iterator[str]:
    """What stands between commas that are outside brackets; one trailing comma is allowed."""
    if not text:
        return
    depth = start = 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _fail(f"unbalanced bracket at {text[: i + 1]!r}")
        if char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    if depth:
        raise _fail(f"missing ']' after {text[start:]!r}")
    if start < len(text):
        yield text[start:]


Reader = Callable[[str, str, dict[str, Any]], Any]


def _bool(key: str, value: str, _: dict[str, Any]) -> bool:
    if value not in ("True", "False"):
        raise _fail(f"{key}:{value} is not True or False", f"write {key}:True or {key}:False")
    return value == "True"


def _whole(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", value):
        raise _fail(f"{key}:{value} is not a whole number")
    return int(value)


def _mebibytes(least: int | None) -> Reader:
    """A size from so many MiB on; None: from the large segment's."""

    def read(key: str, value: str, done: dict[str, Any]) -> int:
        size = min(_whole(key, value), UNLIMITED // MIB) * MIB
        limit = done.get("large_segment_size", 20 * MIB) if least is None else least * MIB
        if size < limit:
            raise _fail(f"{key}:{value} is too small", f"{key} must be at least {limit // MIB}")
        return size

    return read


def _number(holds: Callable[[float], bool], limits: str) -> Reader:
    def read(key: str, value: str, _: dict[str, Any]) -> float:
        try:
            number = float(value)
        except ValueError:
            raise _fail(f"{key}:{value} is not a number") from None
        if not holds(number):
            raise _fail(f"{key}:{value} is out of range", f"{key} must be {limits}")
        return number

    return read


def _power_of_two(key: str, text: str, *, zero: bool = False) -> int:
    number = _whole(key, text)
    if number & (number - 1) or (number == 0 and not zero):
        raise _fail(f"{key}: {text} is not a power of two" + (" or 0" if zero else ""))
    return number


def _roundup(key: str, value: str, _: dict[str, Any]) -> tuple[int, ...]:
    """`4`, or a list such as `[256:1,512:2,>:4]` of MiB intervals and divisions."""
    if not value.startswith("["):
        return (_power_of_two(key, value),) * ROUNDUP_INTERVALS
    divisions = [0] * ROUNDUP_INTERVALS
    last = 0
    first = True
    for entry in filter(None, value.removeprefix("[").removesuffix("]").split(",")):
        interval, colon, text = entry.partition(":")
        if not colon:
            raise _fail(f"{key}: {entry!r} is not INTERVAL:DIVISIONS")
        count = _power_of_two(key, text, zero=True)
        if interval == ">":
            divisions[last + 1 :] = [count] * (ROUNDUP_INTERVALS - last - 1)
            continue
        index = min(_power_of_two(key, interval).bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if first:
            divisions[:index] = [count] * index
            first = False
        divisions[index] = count
        last = index
    return tuple(divisions)


def _backend(key: str, value: str, _: dict[str, Any]) -> str:
    if value not in ("native", "cudaMallocAsync"):
        raise _fail(f"{key}:{value} is unknown", "backends: native, cudaMallocAsync")
    return value


def _threads(key: str, value: str, _: dict[str, Any]) -> int:
    count = _power_of_two(key, value)
    if count > 128:
        raise _fail(f"{key}:{value} is too large", f"{key} must be at most 128")
    return count


_KEYS: dict[str, tuple[Reader, str]] = {
    "expandable_segments": (_bool, "expandable_segments"),
    "max_split_size_mb": (_mebibytes(None), "max_split_size"),
    "max_non_split_rounding_mb": (_mebibytes(None), "max_non_split_rounding"),
    "large_segment_size_mb": (_mebibytes(11), "large_segment_size"),
    "garbage_collection_threshold": (
        _number(lambda x: 0.0 < x < 1.0, "between 0 and 1, both excluded"),
        "garbage_collection_threshold",
    ),
    "roundup_power2_divisions": (_roundup, "roundup_power2_divisions"),
    "per_process_memory_fraction": (
        _number(lambda x: 0.0 <= x <= 1.0, "from 0 to 1"),
        "per_process_memory_fraction",
    ),
    "throw_on_cudamalloc_oom": (_bool, "throw_on_cudamalloc_oom"),
    "backend": (_backend, "backend"),
    "release_lock_on_cudamalloc": (_bool, ""),
    "graph_capture_record_stream_reuse": (_bool, ""),
    "pinned_use_cuda_host_register": (_bool, ""),
    "pinned_num_register_threads": (_threads, ""),
    "pinned_reserve_segment_size_mb": (_mebibytes(1), ""),
    "pinned_free_catch_all": (_bool, ""),
    "pinned_use_background_threads": (_bool, ""),
    "pinned_max_round_threshold_mb": (_mebibytes(0), "pinned_max_round_threshold"),
    "pinned_max_cached_size_mb": (_mebibytes(0), "pinned_max_cached_size"),
}
"""What reads the value of each key, and the field for it; empty where there is none."""
