"""Arithmetic that an answer must agree with."""

from __future__ import annotations

from pathlib import Path

from bench.scripts.case import Answer, Check


def share(key: str, expected_bytes: int, *, tolerance: float = 0.02) -> Check:
    """The breakdown's `key` holds `expected_bytes`, within a fraction `tolerance`."""

    def check(answer: Answer, _work: Path) -> list[str]:
        found = answer["breakdown"][key]
        if abs(found - expected_bytes) <= tolerance * expected_bytes:
            return []
        return [f"{key}: {found:,} bytes, by arithmetic {expected_bytes:,}"]

    return check


def share_at_least(key: str, expected_bytes: int) -> Check:
    """The breakdown's `key` holds at least `expected_bytes`."""

    def check(answer: Answer, _work: Path) -> list[str]:
        found = answer["breakdown"][key]
        if found >= expected_bytes:
            return []
        return [f"{key}: {found:,} bytes, at least {expected_bytes:,} by arithmetic"]

    return check


def peak_between(low_bytes: int, high_bytes: int) -> Check:
    """The process peak lies in `[low_bytes, high_bytes]`."""

    def check(answer: Answer, _work: Path) -> list[str]:
        found = answer["peak_bytes"]
        if low_bytes <= found <= high_bytes:
            return []
        return [f"peak {found:,} bytes is not within {low_bytes:,} - {high_bytes:,}"]

    return check
