"""The section of a step's time: its kernels and collectives on the card's streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memplan.report.html.columns import pack
from memplan.report.step_slices import StepSlices, exchange_text, group_text, step_slices
from memplan.report.text import format_bytes, seconds_text, short_op
from memplan.timing.step import PricedStep, collective_times
from memplan.types.step_graph import F64
from memplan.types.trace import I32, I64, Phase

MOST_SLICES = 30_000
_NANO = 1e9
_GROWING = frozenset({"begin"})


@dataclass(frozen=True)
class StepSection:
    """What the template shows of a step, in words, and the packed table of its picture."""

    card: str
    seconds: str
    steps: int
    """Number of steps in the picture: more than one where steps alternate."""
    streams: list[dict[str, str]]
    collectives: list[dict[str, str]]
    exposed: str
    """Exposed time of all collectives together."""
    table: str


def step_section(priced: PricedStep, card: str) -> StepSection | None:
    """None for a step in which nothing runs on the device."""
    slices = step_slices(priced)
    if not len(slices.op):
        return None
    lanes = np.unique(slices.stream)
    collectives = [
        {
            "kind": one.kind,
            "group": group_text(one.ranks, one.nodes),
            "count": f"{one.count:g}",
            "bytes": format_bytes(one.bytes),
            "seconds": seconds_text(one.seconds),
            "exposed": seconds_text(one.exposed_seconds),
        }
        for one in collective_times(priced)
    ]
    exposed = priced.without(priced.exchanges) / priced.steps if collectives else 0.0
    return StepSection(
        card=card,
        seconds=seconds_text(priced.run.seconds / priced.steps),
        steps=priced.steps,
        streams=[_stream(slices, int(lane), priced) for lane in lanes],
        collectives=collectives,
        exposed=seconds_text(exposed),
        table=_packed(priced, slices, lanes),
    )


def _stream(slices: StepSlices, number: int, priced: PricedStep) -> dict[str, str]:
    mine = slices.stream == number
    busy = float(slices.seconds[mine].sum())
    return {
        "name": f"stream {number}",
        "what": _what(slices, number),
        "kernels": f"{np.count_nonzero(mine) / priced.steps:,.6g}",
        "busy": seconds_text(busy / priced.steps),
        "share": f"{busy / priced.run.seconds:.0%}".replace("%", " %"),
    }


def _what(slices: StepSlices, number: int) -> str:
    exchanged = slices.exchanges[slices.stream == number]
    if exchanged.all():
        return "collectives"
    return "kernels, collectives" if exchanged.any() else "kernels"


def _packed(priced: PricedStep, slices: StepSlices, lanes: I32) -> str:
    """The slices that take the longest, in the order of their beginning."""
    kept = np.arange(len(slices.op))
    if len(kept) > MOST_SLICES:
        kept = np.sort(np.argpartition(-slices.seconds, MOST_SLICES)[:MOST_SLICES])
    begin = _whole(slices.begin[kept])
    strings: dict[str, int] = {"": 0}
    ops, texts = priced.trace.ops, priced.trace.strings
    labels: dict[tuple[int, ...], int] = {}
    label = np.zeros(len(kept), np.int64)
    for place, at in enumerate(kept.tolist()):
        op = int(slices.op[at])
        name = exchange_text(priced, op) if slices.exchanges[at] else short_op(texts[ops.name[op]])
        words = (name, texts[ops.module[op]], texts[ops.source[op]])
        key = tuple(strings.setdefault(word, len(strings)) for word in words)
        label[place] = labels.setdefault(key, len(labels))
    columns = {
        "begin": begin,
        "life": np.maximum(_whole((slices.begin + slices.seconds)[kept]) - begin, 1),
        "lane": np.searchsorted(lanes, slices.stream[kept]),
        "phase": ops.phase[slices.op[kept]],
        "label": label,
        "exchange": slices.exchanges[kept].astype(np.int64),
    }
    more: dict[str, Any] = {
        "end": int(np.ceil(slices.end * _NANO)) + 1,
        "lanes": [[f"stream {lane}", _what(slices, int(lane))] for lane in lanes],
        "phases": [phase.name.lower() for phase in Phase],
        "strings": list(strings),
        "labels": list(labels),
        "left_out": len(slices.op) - len(kept),
    }
    return pack(columns, more, _GROWING)


def _whole(seconds: F64) -> I64:
    return np.rint(seconds * _NANO).astype(np.int64)
