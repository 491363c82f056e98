from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from memplan.order import inductor
from memplan.order.baselines import baseline_orders, best
from memplan.order.inductor_source import inductor_functions
from memplan.order.validate import order_fault
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from tests.order.exhaustive import exhaustive_order
from tests.order.graphs import graphs, make_graph, write_graph
from tests.order.test_solve import training_step


@settings(max_examples=60, deadline=None)
@given(graphs(most=9))
def test_every_candidate_is_an_order(graph: Graph) -> None:
    candidates = baseline_orders(graph)
    assert candidates[0].name == "program"
    assert candidates[0].order.tolist() == list(range(len(graph)))
    assert {c.name for c in candidates[1:]} == (set(inductor.NAMES) if len(graph) > 1 else set())
    for candidate in candidates:
        assert order_fault(graph, candidate.order.tolist(), candidate.peak_bytes) == ""
    assert best(candidates).peak_bytes >= exhaustive_order(graph)[1]


def fan() -> Graph:
    """Three large values that program order makes first; each shrinks at once if it may."""
    return make_graph(
        [[]] * 6,
        [(10, 0, [3], False), (10, 1, [4], False), (10, 2, [5], False)]
        + [(1, op, [], True) for op in (3, 4, 5)],
    )


def test_least_peak_memory_first_frees_at_once() -> None:
    candidates = {c.name: c for c in baseline_orders(fan())}
    assert candidates["program"].peak_bytes == 31
    assert candidates["lpmf"].peak_bytes == 13
    assert candidates["lpmf"].order.tolist() == [0, 3, 1, 4, 2, 5]
    assert best(list(candidates.values())).peak_bytes == 13


def test_a_chain_deeper_than_pythons_stack() -> None:
    count = 2 * sys.getrecursionlimit() + 5000
    graph = make_graph(
        [[op - 1] if op else [] for op in range(count)],
        [(count - op, op, [op + 1], False) for op in range(count - 1)],
    )
    limit = sys.getrecursionlimit()
    found = inductor.inductor_orders(graph, Deadline())
    assert all(order.tolist() == list(range(count)) for order in found.values())
    assert len(found) == 3
    assert sys.getrecursionlimit() == limit


class EndsAt(Deadline):
    """Passes when it was looked at so many times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def left(self) -> float:
        self._looks -= 1
        return float(max(self._looks, 0))


def test_what_is_found_before_the_end_of_time_counts() -> None:
    assert set(inductor.inductor_orders(fan(), EndsAt(10))) == {"lpmf"}
    assert [c.name for c in baseline_orders(fan(), Deadline(0))] == ["program"]


def test_another_inductor_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import memory

    monkeypatch.delattr(memory, "topological_sort_lpmf")
    with caplog.at_level(logging.WARNING):
        assert [c.name for c in baseline_orders(fan())] == ["program"]
    assert "Inductor" in caplog.text


FUNCTIONS = [f"topological_sort_{name}" for name in inductor.NAMES]
WITHOUT_TORCH = """
import sys
from memplan.order.baselines import baseline_orders
from memplan.types.graph_file import load_graph
for candidate in baseline_orders(load_graph(sys.argv[1])):
    print(candidate.name, candidate.order.tolist(), candidate.peak_bytes)
assert "torch" not in sys.modules
"""


def test_the_functions_are_had_without_importing_torch(tmp_path: Path) -> None:
    """The same orders as those of the imported module."""
    graph = training_step(5, batch=2)
    write_graph(graph, tmp_path / "step.graph")
    words = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "step.graph")]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    from torch._inductor import memory

    assert inductor_functions(FUNCTIONS) == {name: getattr(memory, name) for name in FUNCTIONS}
    imported = [f"{c.name} {c.order.tolist()} {c.peak_bytes}" for c in baseline_orders(graph)]
    assert told.splitlines() == imported


@pytest.mark.parametrize(
    "change",
    [
        ("def topological_sort_dfs", "def another_sort"),
        ("seen: OrderedSet", "seen = elsewhere; seen: OrderedSet"),
        ("size_threshold_for_succ_based_strategy", "another_setting"),
        ("def topological_sort_bfs(", "def topological_sort_bfs(:"),
    ],
)
def test_functions_that_are_not_as_expected_are_imported(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot stand alone is not run as if it could."""
    import torch
    from torch._inductor import memory

    real = Path(torch.__file__).parent
    for part in ("_inductor/memory.py", "_inductor/config.py", "utils/_ordered_set.py"):
        copy = tmp_path / "torch" / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = (real / part).read_text(encoding="utf-8")
        if part == "_inductor/memory.py":
            assert change[0] in text
            text = text.replace(*change)
        copy.write_text(text, encoding="utf-8")
    (tmp_path / "torch" / "__init__.py").write_text("", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(
        "torch",
        tmp_path / "torch" / "__init__.py",
        submodule_search_locations=[str(tmp_path / "torch")],
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.delitem(sys.modules, "torch._inductor.memory")
    found = inductor_functions(FUNCTIONS)
    assert all(found[name].__code__ == getattr(memory, name).__code__ for name in FUNCTIONS)
