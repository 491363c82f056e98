"""memplan's native code: see `native/module.cpp`."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

class Statistics(TypedDict):
    """Sums in bytes."""

    requested: int
    allocated: int
    active: int
    reserved: int

class ReplaySummary(TypedDict):
    """What a replay returns beside the columns that it fills."""

    start: Statistics
    num_alloc_retries: int
    oom_event: int
    oom_bytes: int
    unknown_frees: int
    segment_events: list[tuple[int, int, int, int, int]]
    """(event, EventKind number, bytes, stream, address), in order."""

class ReplaySettings(TypedDict):
    """`AllocatorSettings` in bytes; 2**63 - 1 stands for no limit."""

    expandable_segments: bool
    throw_on_cudamalloc_oom: bool
    max_split_size: int
    max_non_split_rounding: int
    large_segment_size: int
    garbage_collection_threshold: float
    roundup_divisions: tuple[int, ...]
    allowed_bytes: int
    capacity_bytes: int
    reserve_bytes: int

def replay(
    kind: npt.NDArray[np.uint8],
    storage: npt.NDArray[np.int64],
    bytes: npt.NDArray[np.int64],
    least: npt.NDArray[np.int64],
    stream: npt.NDArray[np.int32],
    device: npt.NDArray[np.int16],
    aux: npt.NDArray[np.int64],
    segments: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
    settings: ReplaySettings,
    storages: int,
    device_index: int,
    reuse_early: bool,
    requested: npt.NDArray[np.int64],
    allocated: npt.NDArray[np.int64],
    active: npt.NDArray[np.int64],
    reserved: npt.NDArray[np.int64],
    address: npt.NDArray[np.int64],
) -> ReplaySummary:
    """Fill the last five columns with the state after each event.

    `least` is what a request can do with when `bytes` cannot be had; 0: it can do without.

    `segments` holds rows of (address, bytes, stream, small, expandable), flattened; `blocks` rows
    of (segment row, bytes, requested bytes, in use, storage or -1), those of a segment in order of
    address and filling it. Releases the GIL. Raises ValueError for events that cannot be.
    """

def modules_with(modules: list[Any], ids: dict[int, Any]) -> list[int]:
    """The numbers of the modules that have one of these objects, by their ids, as an attribute.
    What is no module has none."""

class Packing(TypedDict):
    """What `pack` found."""

    infeasible: bool
    height_bytes: int
    """Of what is in `offsets`; -1 where it is infeasible."""
    bound_bytes: int
    """No layout is lower."""
    witness: list[int]
    """Rows that cannot be placed together; empty unless infeasible."""

def pack(
    lower: npt.NDArray[np.int64],
    upper: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    alignment: npt.NDArray[np.int64],
    fixed: npt.NDArray[np.int64],
    twin: npt.NDArray[np.int64],
    capacity: int,
    within: float,
    seconds: float,
    seed: int,
    threads: int,
    cancel: bytearray,
    offsets: npt.NDArray[np.int64],
) -> Packing:
    """Fill `offsets` with the lowest layout found, or one within `capacity` (-1: none is given).
    The lowest is not sought any longer once it is `within` such a part above the proved bound.

    `fixed` holds offsets that are given, `twin` rows that must have the same offset, else -1. Stops
    soon after `cancel[0]` is no longer 0. Releases the GIL. Raises ValueError for columns that
    contradict each other.
    """

class OrderCuts:
    """Least bytes alive while an operator runs, whatever ran before it; columns of a `Graph`.
    Calls from several threads are for the caller to keep apart. Raises ValueError for columns that
    contradict each other."""

    def __init__(
        self,
        scratch: npt.NDArray[np.int64],
        before_start: npt.NDArray[np.int64],
        before: npt.NDArray[np.int64],
        bytes: npt.NDArray[np.int64],
        maker: npt.NDArray[np.int64],
        lasts: npt.NDArray[np.uint8],
        users_start: npt.NDArray[np.int64],
        users: npt.NDArray[np.int64],
        base_bytes: int,
    ) -> None: ...
    def flow(
        self,
        op: int,
        also_before: npt.NDArray[np.int64],
        also_after: npt.NDArray[np.int64],
        share: npt.NDArray[np.int64],
        rest: npt.NDArray[np.int64],
        back: npt.NDArray[np.int64],
    ) -> int:
        """Bytes held at least while `op` runs after `also_before` and before `also_after`,
        everything counted, and the flow that proves it. Releases the GIL."""
    def least(
        self,
        ops: npt.NDArray[np.int64],
        held: npt.NDArray[np.int64],
        floor: int,
        seconds: float,
        cancel: bytearray,
        bytes: npt.NDArray[np.int64],
    ) -> int:
        """Fill `bytes` with what is held at least while each of `ops` runs, as far as the returned
        count: they come with the bytes `held` in a known order, most first, and once that is no
        more than `floor` or what was found, none can be higher. Stops soon after `cancel[0]` is no
        longer 0. Releases the GIL."""
    def narrow(
        self, op: int, budget: int, seconds: float, cancel: bytearray
    ) -> tuple[bool, list[int], list[int]]:
        """False where no order keeps the peak within `budget`; and what must then run before `op`
        and after it, each in the order found. Stops as `least` does. Releases the GIL."""

def serve(
    numbers: dict[str, int],
    columns: dict[str, npt.NDArray[np.int64]],
    action: npt.NDArray[np.int64],
    value: npt.NDArray[np.int64],
    stream: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    kind: npt.NDArray[np.int64],
) -> dict[str, int]:
    """Fill `offset` and `kind` with where and how the arena of a planned allocator serves each
    request (-1 and 0: it does not); returns its counters.

    An `action` is 0, a request of `value` bytes; 1, the release of the request that is row `value`;
    2, the beginning of phase `value`. Raises ValueError, with the reason, for what cannot be a
    plan.
    """

class RecomputeModel:
    """What dropping and recomputing values does to a step; columns of a `StepGraph`, bytes beside
    its base bytes. Raises ValueError for columns that contradict each other."""

    def __init__(
        self,
        reads_start: npt.NDArray[np.int64],
        reads: npt.NDArray[np.int64],
        writes_start: npt.NDArray[np.int64],
        writes: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64],
        replayable: npt.NDArray[np.uint8],
        bytes: npt.NDArray[np.int64],
        alloc: npt.NDArray[np.int64],
        free: npt.NDArray[np.int64],
        droppable: npt.NDArray[np.uint8],
        forward_ops: int,
        background: npt.NDArray[np.int64],
        others: int,
    ) -> None: ...
    def evaluate(
        self,
        group: npt.NDArray[np.int32],
        held: npt.NDArray[np.uint8],
        row_bytes: npt.NDArray[np.int64],
        group_seconds: npt.NDArray[np.float64],
    ) -> tuple[int, int, float, int]:
        """Peak bytes, the row of the peak, added seconds, replayed ops. Fills the most bytes alive
        at each row and the seconds of each group's replay. Releases the GIL."""
    def search(
        self,
        drops: npt.NDArray[np.int32],
        holds: npt.NDArray[np.int32],
        group: npt.NDArray[np.int32],
        held: npt.NDArray[np.uint8],
        budget_bytes: int,
        byte_price: float,
        start_temperature: float,
        end_temperature: float,
        iterations: int,
        seed: int,
        deadline_seconds: float,
    ) -> tuple[int, int, float, int]:
        """Improve `group` and `held` in place; returns what `evaluate` says of the result.
        Releases the GIL."""

class SegmentTable:
    """The dynamic programme of `memplan.recompute.segments`, in memory levels. Raises ValueError
    for columns that contradict each other."""

    def __init__(
        self,
        levels: int,
        option_start: npt.NDArray[np.int64],
        between: npt.NDArray[np.int64],
        need: npt.NDArray[np.int64],
        option_seconds: npt.NDArray[np.float64],
        crossing: npt.NDArray[np.int64],
        through: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64],
    ) -> None:
        """Releases the GIL."""
    def best(self, start: int, stop: int, level: int) -> tuple[float, int, int]:
        """Added seconds of blocks [start, stop), and the option of the first, or -1 and where the
        segment that forward skips ends. Infinite where nothing fits."""

def improve_order(
    scratch: npt.NDArray[np.int64],
    before_start: npt.NDArray[np.int64],
    before: npt.NDArray[np.int64],
    bytes: npt.NDArray[np.int64],
    maker: npt.NDArray[np.int64],
    lasts: npt.NDArray[np.uint8],
    users_start: npt.NDArray[np.int64],
    users: npt.NDArray[np.int64],
    base_bytes: int,
    order: npt.NDArray[np.int64],
    floor: int,
    nodes: int,
    seconds: float,
    cancel: bytearray,
) -> tuple[int, int]:
    """Change `order`, an order of the operators of a `Graph`'s columns, into one of a lower peak;
    returns its peak and the largest lower bound on any order's, both in bytes.

    `nodes`: sets of operators looked at before one that holds more is taken. Stops soon after
    `cancel[0]` is no longer 0. Releases the GIL. Raises ValueError for columns that contradict each
    other and for what is no order.
    """

def take_file_calls(answers: object, written: str) -> None:
    """From now on, what native libraries do with paths is answered by attributes of `answers`:
    `found(path, follow)` with the path of a file to read, and the functions of `os` of these names:
    open, unlink, rmdir, mkdir, chmod, truncate, rename, link, symlink. Paths are bytes. Files to
    read are not asked about where the directory `written` has nothing of the folder they are in."""

def give_back_file_calls() -> None:
    """Undo `take_file_calls`."""
