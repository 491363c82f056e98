"""Why an interval is wide: whose sizes are uncertain."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from memplan.estimation.interval import Interval, margin_bytes
from memplan.types.trace import EventKind, EventView, Provenance, Trace

_WIDE = 0.10
"""An interval is called wide if the replays, without margins, differ by more than this share of the
expected reserved peak."""
_GIB, _MIB = 1 << 30, 1 << 20
_CAUSES = {
    "convolution": "cuDNN chooses its convolution workspaces when it runs",
    "_cudnn_rnn": "cuDNN does not publish what its recurrent layers keep",
    "attention": "attention kernels take workspaces that depend on their version",
    "kv_cache": "an engine's KV cache is what its activations and CUDA graphs leave of its share",
}
"""Causes of wide intervals, by a part of an operator's name."""
_OTHER = "kernels take scratch memory whose size is not published"
_ASSUMED = "sizes depend on values of data"
_NOT_COMPILED = "a graph that could not be compiled here was captured as eager"


def why_wide(trace: Trace, interval: Interval) -> list[str]:
    """One sentence that explains a wide interval; none when it is narrow, or no single
    request is uncertain by 1 MiB."""
    low, expected, high = interval.reserved
    spread = high - low - 2 * margin_bytes(expected, trace.meta.method)
    if spread <= _WIDE * expected:
        return []
    # The cause that moves the peak most is taken to be the one with the largest single request.
    causes = {"": (0, 0)} | _causes(trace)
    text, (least, most) = max(causes.items(), key=lambda cause: cause[1][1] - cause[1][0])
    if most - least < _MIB:
        return []
    return [
        f"The range is wide because {text}: the largest takes between {_size(least)} and "
        f"{_size(most)}."
    ]


def _causes(trace: Trace) -> dict[str, tuple[int, int]]:
    """Low and high bytes of the most uncertain request, by what makes it uncertain."""
    events = trace.events
    uncertain = events.bytes_high - events.bytes_low
    rows = np.flatnonzero((events.kind == EventKind.ALLOC) & (uncertain > 0))
    groups: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in rows.tolist():
        text = _cause(trace, trace.event(row))
        bounds = int(events.bytes_low[row]), int(events.bytes_high[row])
        groups[text] = max(groups[text], bounds, key=lambda pair: pair[1] - pair[0])
    return dict(groups)


def _cause(trace: Trace, event: EventView) -> str:
    if event.provenance != Provenance.ASSUMED:
        return next((text for part, text in _CAUSES.items() if part in event.op), _OTHER)
    compiles = [item for item in trace.meta.assumptions if item.kind == "compile"]
    here = [item for item in trace.meta.assumptions if item.source == event.source]
    text = _NOT_COMPILED if compiles else _ASSUMED
    of_place = (f" ({item.text}, {item.source})" for item in compiles or here if item.source)
    return text + next(of_place, "")


def _size(nbytes: int) -> str:
    if nbytes >= _GIB:
        return f"{nbytes / _GIB:.1f} GiB"
    return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else "nothing"
