"""Memory that hangs on a router's choices: how many rows the experts of this process get.

The capture spreads choices evenly. Real ones are not even, least before an auxiliary loss has had
its say, and nothing here tells how they fall: so what a mixture of experts allocates is taken to be
half as much, and half as much again. (Layers that give experts a fixed room give them 1 to 2 times
their even share: the capacity factors of GShard, arXiv 2006.16668, and of the Switch Transformer,
arXiv 2101.03961.) Choices of which the host never hears and which decide no shape cost no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memplan.types.trace import EventKind, Phase, Role, Trace

SHARES = (0.5, 1.5)
"""The factors of an even share of rows that are tried."""
_KEPT = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION)
_HEARD = ("aten._local_scalar_dense", "aten._to_copy", "aten.copy_", "aten.item")
"""Operators by which the host reads a tensor; those of them count that write nothing."""
_SHAPED = ("aten.nonzero", "aten.masked_select", "aten.bincount", "aten.repeat_interleave")


def uneven(trace: Trace) -> Iterator[Trace]:
    """The trace with fewer and with more rows for its experts; nothing where it has none."""
    rows = _rows(trace)
    if not rows.any():
        return
    events = trace.events
    for share in SHARES:
        sizes = [
            np.where(rows, (column * share).astype(np.int64), column)
            for column in (events.bytes, events.bytes_low, events.bytes_high)
        ]
        changed = replace(events, bytes=sizes[0], bytes_low=sizes[1], bytes_high=sizes[2])
        yield replace(trace, events=changed)


def note(trace: Trace) -> list[str]:
    """What the range holds, in a sentence."""
    if not _rows(trace).any():
        return []
    first, *more = sorted(_blocks(trace))
    others = f" and {len(more)} more" if more else ""
    return [
        f"how choices fall in {first}{others} (tokens on experts, boxes on objects) is not known: "
        "the answer is for even shares, and the range holds half of that and half as much again"
    ]


def _rows(trace: Trace) -> npt.NDArray[np.bool_]:
    """Whether each event is a request within a mixture of experts."""
    modules = np.zeros(len(trace.strings), np.bool_)
    for block in _blocks(trace):
        inside = block + "."
        modules |= [text == block or text.startswith(inside) for text in trace.strings]
    events = trace.events
    rows: npt.NDArray[np.bool_] = (
        (events.kind == EventKind.ALLOC)
        & modules[events.module]
        & np.isin(events.phase, _PASSES)
        & ~np.isin(np.append(trace.storages.role, Role.UNKNOWN)[events.storage], _KEPT)
    )
    return rows


def _blocks(trace: Trace) -> set[str]:
    """Names of the modules in which choices decide sizes."""
    places = {(item.op, item.source) for item in trace.meta.assumptions if item.kind == "routing"}
    if not places:
        return set()
    ops, strings = trace.ops, trace.strings
    pairs = zip(ops.name.tolist(), ops.source.tolist(), strict=True)
    chosen = [row for row, (name, at) in enumerate(pairs) if (strings[name], strings[at]) in places]
    routers: dict[str, int] = {}
    for row in chosen:
        routers.setdefault(strings[int(ops.module[row])], row)
    found = (_block(trace, module, row) for module, row in routers.items() if module)
    return {block for block in found if block}


def _block(trace: Trace, module: str, row: int) -> str:
    """The mixture to which a router belongs: it may be a module by itself. Empty for none."""
    around = module.rpartition(".")[0]
    candidates = [module, *([around] if "." in around else [])]
    return next((block for block in candidates if _decide(trace, block, row)), "")


def _decide(trace: Trace, block: str, first: int) -> bool:
    """Whether the host, or a shape, hears of the choices before the block is left."""
    ops, strings = trace.ops, trace.strings
    known: set[int] = set()
    for row in range(first, len(ops)):
        module = strings[int(ops.module[row])]
        if module != block and not module.startswith(block + "."):
            return False
        read = ops.reads[ops.reads_start[row] : ops.reads_start[row + 1]].tolist()
        written = ops.writes[ops.writes_start[row] : ops.writes_start[row + 1]].tolist()
        if row != first and known.isdisjoint(read):
            continue
        name = strings[int(ops.name[row])]
        if name.startswith(_SHAPED) or (not written and name.startswith(_HEARD)):
            return True
        known.update(written)
    return False
