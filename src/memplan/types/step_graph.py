"""The `StepGraph`: what one pass through forward and backward computes, holds and needs.

A *pass* is one forward and its backward (a micro-batch). Rows are ops in program order, forward
first: `[0, forward_ops)`, then backward `[forward_ops, len(graph))`. A *value* is a storage
generation with all its views. Times are op rows: a value is alive over the half-open range
`[alloc, free)` of rows, and what is alive during a row counts towards that row's memory. Everything
that neither begins nor ends within the pass (parameters, optimizer state, gradients that already
exist) is in `base_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class GraphOps:
    """One row an op. `reads` and `writes` are CSR: row i owns
    `reads[reads_start[i]:reads_start[i + 1]]`, values without repetition. The op after which
    autograd lets go of a droppable value is among its readers."""

    name: list[str]
    """Overload name as the dispatcher has it: `aten.mm.default`."""
    call: I64
    """Which call of a root module (a module that no other one called) in this pass it belongs to,
    from 0; -1 outside such calls and in backward. Only ops inside a call can be replayed."""
    nth: I64
    """How many ops of the same name came before it in its call; -1 where `call` is. Call, name and
    nth identify a forward op from one pass to the next."""
    module: list[str]
    """Dotted module path; empty outside modules."""
    seconds: F64
    """Expected duration on the device, 0 for views; of a forward op, when it is replayed."""
    flops: I64
    replayable: Bools
    """Whether running a forward op again gives its result again (a generator's state is restored
    for it). False for ops that read from or write to the world outside."""
    reads_start: I64
    reads: I64
    writes_start: I64
    writes: I64

    def __len__(self) -> int:
        return len(self.name)

    def reads_of(self, row: int) -> list[int]:
        return self._reads_by_row[row]

    def writes_of(self, row: int) -> list[int]:
        return self._writes_by_row[row]

    @cached_property
    def _reads_by_row(self) -> list[list[int]]:
        return _by_row(self.reads_start, self.reads)

    @cached_property
    def _writes_by_row(self) -> list[list[int]]:
        return _by_row(self.writes_start, self.writes)


def _by_row(start: I64, edges: I64) -> list[list[int]]:
    found = edges.tolist()
    return [found[first:last] for first, last in pairwise(start.tolist())]


@dataclass(frozen=True)
class GraphValues:
    """One row a value that is allocated or freed within the pass, or read by an op of it."""

    bytes: I64
    """Requested bytes; 0 for values that `base_bytes` counts already."""
    alloc: I64
    """Row that allocates it; -1 when it is there before the pass."""
    free: I64
    """First row at whose start it is gone in the plain run; `len(ops)` where it outlives the
    pass."""
    droppable: Bools
    """Whether a value can be dropped: replayable forward ops make it, backward reads it, and only
    autograd's saved tensors hold it, as far as known."""
    name: list[str]
    """Parameter or buffer name, where there is one."""

    def __len__(self) -> int:
        return len(self.bytes)


@dataclass(frozen=True)
class Touches:
    """The rows that read or write each value."""

    last_forward: I64
    """-1 for none; so is `last_backward`."""
    first_backward: I64
    """The number of rows for none."""
    last_backward: I64


@dataclass(frozen=True)
class StepGraph:
    """See the module. Immutable; `check()` raises ValueError where it contradicts itself."""

    ops: GraphOps
    values: GraphValues
    forward_ops: int
    base_bytes: int
    rest_peak_bytes: int
    """Peak of the step outside this pass and those like it (the optimizer's update); no
    recomputation lowers it."""
    passes: int = 1
    """How many passes of a step have this forward, at least 1; the graph is the costliest's."""
    others: int = 0
    """Passes in flight beside this one while it runs, as on a pipeline stage. Each holds what this
    one keeps from forward to backward; `base_bytes` has what that is in the plain run."""
    kinds: tuple[tuple[str, ...], ...] = ()
    """The root modules that each kind of pass calls, as in a plan (`RecomputePart.kinds`); empty
    where one kind is planned, wherever it occurs."""
    calls_before: int = 0
    """How many calls of these kinds are numbered before those of this one."""
    between: frozenset[int] = frozenset()
    """Values that replays begin with, because FSDP has released the weights that lead to them. A
    plan holds those that are freed in forward; backward keeps the others, or they are offloaded."""
    replay_overhead_seconds: float = 0.0
    """How much of the ops' seconds, in sum, only replays take; a plain pass takes less by it."""

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step's passes without replays."""
        return (float(self.ops.seconds.sum()) - self.replay_overhead_seconds) * self.passes

    def with_replay_overhead(self, seconds: float) -> StepGraph:
        """The same where replaying an op takes so much longer than running it first; views take no
        time."""
        longer = (np.arange(len(self)) < self.forward_ops) & (self.ops.seconds > 0)
        return replace(
            self,
            ops=replace(self.ops, seconds=self.ops.seconds + seconds * longer),
            replay_overhead_seconds=self.replay_overhead_seconds + seconds * int(longer.sum()),
        )

    @cached_property
    def touches(self) -> Touches:
        last_forward, last_backward = np.full((2, len(self.values)), -1, np.int64)
        first_backward = np.full(len(self.values), len(self), np.int64)
        for edges, start in (
            (self.ops.reads, self.ops.reads_start),
            (self.ops.writes, self.ops.writes_start),
        ):
            rows = np.repeat(np.arange(len(self)), np.diff(start))
            forward = rows < self.forward_ops
            np.maximum.at(last_forward, edges[forward], rows[forward])
            np.minimum.at(first_backward, edges[~forward], rows[~forward])
            np.maximum.at(last_backward, edges[~forward], rows[~forward])
        return Touches(last_forward, first_backward, last_backward)

    def check(self) -> None:
        count, values = len(self.ops), len(self.values)
        if not 0 <= self.forward_ops <= count:
            raise ValueError(f"{self.forward_ops} forward ops of {count}")
        for edges, start in (
            (self.ops.reads, self.ops.reads_start),
            (self.ops.writes, self.ops.writes_start),
        ):
            if len(start) != count + 1 or (
                len(edges) and not 0 <= edges.min() <= edges.max() < values
            ):
                raise ValueError("reads or writes name values that do not exist")
        if (self.values.free < self.values.alloc).any() or (self.values.bytes < 0).any():
            raise ValueError("a value ends before it begins or has negative bytes")
