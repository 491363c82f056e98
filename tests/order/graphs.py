"""Graphs for the tests of orders: any, and small ones drawn by hypothesis."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from memplan.types.graph import Graph, csr


def make_graph(
    before: Sequence[Iterable[int]],
    values: Sequence[tuple[int, int, Iterable[int], bool]],
    scratch: Sequence[int] | None = None,
    base_bytes: int = 0,
) -> Graph:
    """Operators by what must run before them, beyond the makers of what they use, which are added;
    values by (bytes, maker, users, lasts)."""
    needs = [set(row) for row in before]
    for _, maker, users, _ in values:
        if maker >= 0:
            for user in users:
                needs[user].add(maker)
    before_start, flat_before = csr(needs)
    users_start, flat_users = csr(set(users) for _, _, users, _ in values)
    graph = Graph(
        name=[f"op{i}" for i in range(len(before))],
        scratch=np.array(scratch if scratch is not None else [0] * len(before), np.int64),
        before_start=before_start,
        before=flat_before,
        bytes=np.array([nbytes for nbytes, _, _, _ in values], np.int64),
        maker=np.array([maker for _, maker, _, _ in values], np.int64),
        lasts=np.array([lasts for _, _, _, lasts in values], np.bool_),
        users_start=users_start,
        users=flat_users,
        base_bytes=base_bytes,
    )
    graph.check()
    return graph


def write_graph(graph: Graph, path: Path) -> None:
    """As `load_graph` reads it; values are named by their numbers."""
    lines: list[dict[str, object]] = [{"memplan_graph": 1, "base_bytes": graph.base_bytes}]
    sizes = {f"v{value}": int(nbytes) for value, nbytes in enumerate(graph.bytes)}
    makes: list[list[str]] = [[] for _ in range(len(graph))]
    uses: list[list[str]] = [[] for _ in range(len(graph))]
    for value, maker in enumerate(graph.maker.tolist()):
        for user in graph.users_of(value).tolist():
            uses[user].append(f"v{value}")
        if maker >= 0:
            makes[maker].append(f"v{value}")
        else:
            lasts = bool(graph.lasts[value])
            lines.append({"value": f"v{value}", "bytes": sizes[f"v{value}"], "lasts": lasts})
    for op, name in enumerate(graph.name):
        makers = {int(graph.maker[int(value[1:])]) for value in uses[op]}
        lines.append(
            {
                "op": name,
                "id": str(op),
                "scratch": int(graph.scratch[op]),
                "makes": {value: sizes[value] for value in makes[op]},
                "lasts": [value for value in makes[op] if graph.lasts[int(value[1:])]],
                "uses": uses[op],
                "after": [str(row) for row in graph.before_of(op).tolist() if row not in makers],
            }
        )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


@st.composite
def graphs(draw: st.DrawFn, most: int = 12) -> Graph:
    """Any small graph: values with several users, none, mutations (dependencies without data),
    values there before, results, scratch."""
    count = draw(st.integers(1, most))
    before = [
        draw(st.sets(st.integers(0, op - 1), max_size=2)) if op else set() for op in range(count)
    ]
    values = []
    for _ in range(draw(st.integers(0, 2 * count))):
        maker = draw(st.integers(-1, count - 1))
        later = st.integers(maker + 1, count - 1) if maker + 1 < count else st.nothing()
        users = draw(st.sets(later, max_size=3)) if maker + 1 < count else set()
        values.append((draw(st.integers(0, 20)), maker, users, draw(st.integers(0, 5)) == 0))
    scratch = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    return make_graph(before, values, scratch, draw(st.integers(0, 3)))


def random_order(graph: Graph, seed: int) -> list[int]:
    """Any order that keeps to the dependencies."""
    chance = random.Random(seed)
    done: list[int] = []
    missing = set(range(len(graph)))
    while missing:
        ready = [op for op in sorted(missing) if not missing & set(graph.before_of(op).tolist())]
        done.append(chance.choice(ready))
        missing.discard(done[-1])
    return done
