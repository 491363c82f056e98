"""Slices of a card (MIG) as profiles: the figures and their sources are data, in `mig.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

import msgspec

from memplan.types.device import MIB, DeviceProfile


class _Slices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    slices: dict[str, int]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    cards: dict[str, _Slices]


@cache
def _file() -> _File:
    text = resources.files("memplan.placement").joinpath("mig.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File)


def slices_of(card: DeviceProfile) -> dict[str, DeviceProfile]:
    """The MIG profiles of a card by name, the smallest first; empty for a card without MIG or with
    unknown profiles. They differ from the card in memory only: rates and multiprocessors are the
    card's."""
    row = _file().cards.get(card.name)
    if row is None:
        return {}
    source = {"total_memory": _file().sources[row.source]}
    return {
        name: msgspec.structs.replace(
            card, total_memory_bytes=mebibytes * MIB, sources=card.sources | source
        )
        for name, mebibytes in sorted(row.slices.items(), key=lambda slice_: slice_[1])
    }
