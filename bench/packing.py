"""How low, how surely and how fast buffers are packed (`packing.json`), beside greedy-by-size and
omnimalloc's allocators on the same problems, in the same time.

    python -m bench.packing [--only NAME] [--seconds 15]

The problems: MiniMalloc's public ones where the shared data folder is there, tilings of a
rectangle made here (the least height is known: the rectangle's), random buffers, and what is made
like a large step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import omnimalloc

from bench.layout.greedy import greedy_by_size
from bench.results import ROOT, write_result
from memplan.layout.problem import Problem, make_problem
from memplan.layout.problem_file import read_problem
from memplan.layout.solve import fit_capacity, minimise
from memplan.types.deadline import Deadline
from memplan.types.solution import Infeasible, Solved
from tests.oracles.layout_fault import validate

MINIMALLOC_CAPACITY = 1_048_576
DECIDE_SECONDS = 10.0
MINIMISE_SECONDS = 15.0
LARGE, CLOSE, CLOSE_SECONDS = 100_000, 1e-3, 10.0
"""So many buffers are also asked for a layout so close to the bound, in so much time."""
PEERS = ("supermalloc", "telamalloc")
PEER_PATIENCE = 4
"""A peer that has not answered after so many times the seconds it was given is ended."""


def tiling(count: int, seed: int) -> Problem:
    """A rectangle cut at random into `count` buffers: any layout without a gap is optimal."""
    rng = random.Random(seed)
    tiles = [(0, 512, 0, 1024)]
    while len(tiles) < count:
        tiles.sort(key=lambda t: (t[1] - t[0]) * (t[3] - t[2]) * rng.random())
        begin, end, low, high = tiles.pop()
        if end - begin > 1 and (high - low == 1 or rng.random() < 0.5):
            cut = rng.randint(begin + 1, end - 1)
            tiles += [(begin, cut, low, high), (cut, end, low, high)]
        else:
            cut = rng.randint(low + 1, high - 1)
            tiles += [(begin, end, low, cut), (begin, end, cut, high)]
    rng.shuffle(tiles)
    columns = np.array(tiles, np.int64)
    return make_problem(columns[:, 0], columns[:, 1], columns[:, 3] - columns[:, 2])


def random_buffers(count: int, seed: int) -> Problem:
    """Sizes over three orders of magnitude, lifetimes over two."""
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, count, count)
    upper = lower + 1 + np.exp(rng.uniform(0, np.log(count / 4), count)).astype(np.int64)
    size = 512 * np.exp(rng.uniform(0, np.log(1000), count)).astype(np.int64)
    return make_problem(lower, upper, size)


def training_step(count: int, seed: int) -> Problem:
    """Made like a step: operators nest their results and temporaries, forward keeps some of them,
    which backward releases in reverse; thirty sizes."""
    rng = random.Random(seed)
    sizes = [512 * int(2 ** rng.uniform(0, 14)) for _ in range(30)]
    rows: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []
    kept: list[tuple[int, int]] = []
    now = 0

    def close(begun: tuple[int, int]) -> None:
        nonlocal now
        rows.append((begun[0], now, begun[1]))
        now += 1

    while len(rows) + len(open_) + len(kept) < count or kept:
        forward = len(rows) + len(kept) < count // 2
        open_.append((now, rng.choice(sizes)))
        now += 1
        if not forward and kept and rng.random() < 0.55:
            close(kept.pop())
        while len(open_) > rng.randint(1, 10):
            begun = open_.pop(rng.randrange(len(open_)) if rng.random() < 0.3 else -1)
            if forward and rng.random() < 0.35:
                kept.append(begun)
            else:
                close(begun)
    for begun in open_:
        close(begun)
    columns = np.array(rows, np.int64)
    return make_problem(columns[:, 0], columns[:, 1], columns[:, 2])


def problems() -> dict[str, tuple[Problem, int | None]]:
    """By name, with the capacity to decide where there is one."""
    folder = Path(os.environ.get("MEMPLAN_SHARED_DATA") or ROOT.parent / "shared" / "data")
    found: dict[str, tuple[Problem, int | None]] = {}
    for path in sorted((folder / "packing").glob("*.csv")):
        tight = path.stem.endswith(str(MINIMALLOC_CAPACITY))
        name = path.stem.removesuffix(f".{MINIMALLOC_CAPACITY}")
        found[name] = (read_problem(path), MINIMALLOC_CAPACITY if tight else None)
    for count in (60, 120, 240):
        found[f"tiling_{count}"] = (tiling(count, count), 1024)
    for count in (300, 3000, 30_000):
        found[f"random_{count}"] = (random_buffers(count, count), None)
    found["step_200000"] = (training_step(200_000, 1), None)
    return found


def decide(problem: Problem, capacity: int) -> dict[str, Any]:
    began = time.perf_counter()
    answer = fit_capacity(problem, capacity, deadline=Deadline(DECIDE_SECONDS))
    seconds = time.perf_counter() - began
    return {
        "capacity_bytes": capacity,
        "decided": isinstance(answer, Solved | Infeasible),
        "fits": isinstance(answer, Solved),
        "seconds": seconds,
    }


def ours(problem: Problem, seconds: float, within: float = 0.0) -> dict[str, Any]:
    began = time.perf_counter()
    answer = minimise(problem, deadline=Deadline(seconds), within=within)
    took = time.perf_counter() - began
    if isinstance(answer, Infeasible):
        raise AssertionError(answer.reason)  # without a capacity or fixed offsets there is a layout
    layout = answer.solution if isinstance(answer, Solved) else answer.best
    if layout is None:
        raise AssertionError(f"nothing found in {seconds} s")
    if len(problem) <= 5000 and (fault := validate(problem, layout.offsets)):
        raise AssertionError(fault)
    return {
        "height_bytes": layout.height,
        "lower_bound_bytes": int(answer.bound),
        "optimal": layout.height == int(answer.bound),
        "above_bound": layout.height / answer.bound - 1.0,
        "seconds": took,
    }


def peer(problem: Problem, name: str, seconds: float) -> dict[str, Any]:
    """omnimalloc's allocator of that name, in a process of its own: its time is bounded by its own
    option, which on large problems it may not keep. No height where it did not answer."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=peer_process, args=(sender, problem, name, seconds))
    process.start()
    sender.close()
    patience = PEER_PATIENCE * seconds + 30  # starting and handing over take seconds of their own
    nothing: dict[str, Any] = {"height_bytes": None, "seconds": None, "ended_after": patience}
    try:
        answer: dict[str, Any] = receiver.recv() if receiver.poll(patience) else nothing
        return answer
    except EOFError:  # it died
        return nothing | {"ended_after": None}
    finally:
        process.kill()
        process.join()


def peer_process(sender: Connection, problem: Problem, name: str, seconds: float) -> None:
    buffers = tuple(
        omnimalloc.Allocation(id=row, size=int(size), start=int(lower), end=int(upper))
        for row, (size, lower, upper) in enumerate(
            zip(problem.size, problem.lower, problem.upper, strict=True)
        )
    )
    began = time.perf_counter()
    allocator = omnimalloc.allocators.BaseAllocator.get(name)(timeout=seconds)
    placed = omnimalloc.allocate(buffers, allocator=allocator)
    took = time.perf_counter() - began
    height = max(int(b.offset) + int(b.size) for b in placed)
    sender.send({"height_bytes": height, "seconds": took})


def compare(problem: Problem, capacity: int | None, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"buffers": len(problem), "max_load_bytes": problem.max_load}
    if capacity is not None:
        row["decide"] = decide(problem, capacity)
    if len(problem) >= LARGE:
        row["close"] = ours(problem, CLOSE_SECONDS, within=CLOSE)
    row["memplan"] = ours(problem, seconds)
    row["greedy_bytes"] = greedy_by_size(problem).height if len(problem) <= 5000 else None
    for name in PEERS:
        row[name] = peer(problem, name, seconds)
    heights = [row[name]["height_bytes"] for name in PEERS if row[name]["height_bytes"] is not None]
    row["best_peer_bytes"] = min(heights, default=None)
    row["ahead_or_equal"] = all(row["memplan"]["height_bytes"] <= height for height in heights)
    return row


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    decided = [row["decide"] for row in rows.values() if "decide" in row]
    quick = [rows[name]["memplan"] for name in ("resnet50", "G_1") if name in rows]
    return {
        "to_decide": len(decided),
        "decided": sum(one["decided"] for one in decided),
        "slowest_decision_seconds": max(one["seconds"] for one in decided),
        "most_above_bound": max(
            row["memplan"]["above_bound"] for row in rows.values() if "decide" in row
        ),
        "random_above_bound": max(
            row["memplan"]["above_bound"] for row in rows.values() if "decide" not in row
        ),
        "large_step_seconds": rows["step_200000"]["close"]["seconds"],
        "large_step_above_bound": rows["step_200000"]["close"]["above_bound"],
        "slowest_network_seconds": max((one["seconds"] for one in quick), default=None),
        "networks_optimal": sum(one["optimal"] for one in quick),
        "problems": len(rows),
        "ahead_or_equal": sum(row["ahead_or_equal"] for row in rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="one problem, printed and not written")
    parser.add_argument("--seconds", type=float, default=MINIMISE_SECONDS)
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, (problem, capacity) in problems().items():
        if args.only in (None, name):
            rows[name] = compare(problem, capacity, args.seconds)
            print(name, rows[name], flush=True)
    if args.only is None:
        data = {"minimise_seconds": args.seconds, **summary(rows), "rows": rows}
        print(write_result("packing", data))


if __name__ == "__main__":
    main()
