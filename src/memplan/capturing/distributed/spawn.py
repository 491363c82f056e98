"""`torch.multiprocessing.spawn`: the captured rank's function runs in this process."""

from __future__ import annotations

from typing import Any

from memplan.capturing.options import RankPlace
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError


class _Ended:
    """Stands in for the context of processes that `join=False` gives."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def make_spawn(state: CaptureState, place: RankPlace | None, original: Any) -> Any:
    """Stand-in for `spawn` and `start_processes`."""

    def spawn(
        fn: Any,
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
        **_rest: Any,
    ) -> Any:
        if place is None and nprocs != 1:
            return original(fn, args, nprocs, join, daemon, start_method)
        if place is not None and nprocs != place.local_world_size:
            raise CaptureError(
                f"{state.source()}: {nprocs} processes are spawned, but what is captured has "
                f"{place.local_world_size} in a node",
                f"--world-size {nprocs} for one node of {nprocs}",
            )
        fn(place.local_rank if place is not None else 0, *args)
        return None if join else _Ended()

    return spawn
