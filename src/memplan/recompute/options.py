"""Options of one block: what it recomputes, with the bytes it keeps, its peak and its seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.recompute.blocks import Block
from memplan.recompute.evaluate import Evaluator, SearchSettings, to_arrays
from memplan.recompute.selection import Selection
from memplan.types.step_graph import F64
from memplan.types.trace import I64

KEEP_STEPS = 12
"""Number of limits on the bytes kept between passes for which options are searched."""


@dataclass(frozen=True)
class BlockOptions:
    """A row for each option. The first drops nothing, the second everything in one group."""

    selections: tuple[Selection, ...]
    """In value numbers of the block's graph."""
    between: I64
    """Bytes kept between the block's forward and its backward."""
    window: I64
    """The most bytes during the block's backward, without those that earlier blocks keep."""
    forward: I64
    """The most bytes during its forward, without those that earlier blocks keep."""
    seconds: F64

    def __len__(self) -> int:
        return len(self.selections)


def options_of(block: Block, deadline_seconds: float) -> tuple[Selection, ...]:
    """Options for all blocks with this block's signature.

    They are found by annealing for a grid of limits on the bytes kept and on the peak of backward.
    It takes about `deadline_seconds` at most, half of it for the first and last limit.
    """
    drops = [block.local[value] for value in block.drops]
    nothing = Selection()
    if not drops:
        return (nothing,)
    everything = Selection((frozenset(drops),))
    single = Selection(tuple(frozenset({value}) for value in drops))
    plain = judge(block, (nothing, everything))
    most = int(max(plain.window.max(), plain.forward.max(), plain.between.max()))
    kept, least = int(plain.between[0]), int(plain.between[1])
    found = [nothing, everything, single]
    lowest = _search(block, drops, 0, 0, everything, deadline_seconds / 4)
    found.append(lowest)
    low = judge(block, (lowest,))
    tight = int(max(low.window[0], low.forward[0]))
    limits = [(tight, kept), (tight + (most - tight) // 4, kept)]
    for step in range(KEEP_STEPS):
        keep = least + (kept - least) * step // KEEP_STEPS
        limits += [(top, keep) for top in sorted({most, tight + (most - tight) // 3, tight})]
    each = deadline_seconds * 0.75 / len(limits)
    start = everything
    for top, keep in limits:
        start = _search(block, drops, top, keep, start, each)
        found.append(start)
    return tuple(dict.fromkeys(found))


def judge(block: Block, selections: tuple[Selection, ...]) -> BlockOptions:
    """Evaluate options in one block."""
    evaluator = Evaluator(block.graph, block.background)
    rows = np.zeros((4, len(selections)), dtype=np.int64)
    seconds = np.zeros(len(selections), dtype=np.float64)
    for place, selection in enumerate(selections):
        profile = evaluator.profile(*to_arrays(block.graph, selection))
        rows[0, place] = profile.row_bytes[block.between]
        rows[1, place] = profile.row_bytes[block.between + 2 :].max(initial=0)
        rows[2, place] = profile.row_bytes[: block.between].max(initial=0)
        seconds[place] = profile.seconds
    keep = _worth_keeping(rows[0], rows[1], rows[2], seconds)
    return BlockOptions(
        tuple(selections[place] for place in keep),
        rows[0, keep],
        rows[1, keep],
        rows[2, keep],
        seconds[keep],
    )


def _worth_keeping(between: I64, window: I64, forward: I64, seconds: F64) -> list[int]:
    """The first two options, and all others that no option dominates."""
    table = np.stack([between, window, forward, seconds])
    other, place = table[:, :, None], table[:, None, :]
    order = np.arange(table.shape[1])
    better = (other < place).any(axis=0) | (order[:, None] < order)
    beaten = ((other <= place).all(axis=0) & better).any(axis=0)
    return [int(found) for found in np.flatnonzero(~beaten | (order < 2))]


def _search(
    block: Block, drops: list[int], top: int, keep: int, start: Selection, deadline_seconds: float
) -> Selection:
    """The quickest option found with at most `top` bytes at each row and `keep` bytes kept; with
    `top` 0 the one with the lowest peak."""
    background = block.background.copy()
    background[block.between] = top - keep
    forward = max(float(block.graph.ops.seconds[: block.between].sum()), 1e-12)
    size = max(1, int(block.graph.values.bytes[drops].sum()))
    price = (64 if top else 1e3) * forward / size
    heat = forward * 0.1 if top else 50 * forward
    settings = SearchSettings(
        budget_bytes=top,
        drops=drops,
        holds=(),
        byte_price=price,
        start_temperature=heat,
        end_temperature=heat * 1e-3,
        iterations=100 * len(drops),
        deadline_seconds=deadline_seconds,
    )
    return Evaluator(block.graph, background).search(start, settings)
