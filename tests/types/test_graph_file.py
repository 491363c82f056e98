from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from memplan.types.errors import FormatError, UsageError
from memplan.types.graph import Graph
from memplan.types.graph_file import MAX_TOTAL_BYTES, load_graph
from tests.order.graphs import graphs, write_graph

EXAMPLE = """\
{"memplan_graph": 1, "base_bytes": 1000}
{"value": "input", "bytes": 40}
{"value": "weight", "bytes": 100, "lasts": true}
{"op": "aten.mm", "source": "t.py:3", "makes": {"h": 80, "mask": 8}, "uses": ["input", "weight"]}

{"op": "aten.sum", "scratch": 16, "makes": {"loss": 4}, "lasts": ["loss"], "uses": ["h"], "id": "s"}
{"op": "aten.add_", "uses": ["weight"], "after": ["s"]}
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "graph.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_by_hand(tmp_path: Path) -> None:
    graph = load_graph(written(tmp_path, EXAMPLE))
    assert graph.name == ["aten.mm", "aten.sum", "aten.add_"]
    assert graph.scratch.tolist() == [0, 16, 0]
    assert graph.base_bytes == 1000
    assert graph.value_name == ["input", "weight", "h", "mask", "loss"]
    assert graph.bytes.tolist() == [40, 100, 80, 8, 4]
    assert graph.maker.tolist() == [-1, -1, 0, 0, 1]
    assert graph.lasts.tolist() == [False, True, False, False, True]
    assert [graph.users_of(value).tolist() for value in range(5)] == [[0], [0, 2], [1], [], []]
    assert [graph.before_of(op).tolist() for op in range(3)] == [[], [0], [1]]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_what_is_written_is_read(tmp_path: Path, graph: Graph) -> None:
    path = tmp_path / "graph.jsonl"
    write_graph(graph, path)
    read = load_graph(path)
    # Values come in another order: those that are there first, the others by maker.
    rank = np.lexsort((np.arange(graph.values), graph.maker))
    for column in ("name", "scratch", "before_start", "before", "base_bytes"):
        assert np.array_equal(getattr(read, column), getattr(graph, column)), column
    for column in ("bytes", "maker", "lasts"):
        assert np.array_equal(getattr(read, column), getattr(graph, column)[rank]), column
    for number, value in enumerate(rank.tolist()):
        assert np.array_equal(read.users_of(number), graph.users_of(value))
    assert {field.name for field in fields(Graph)} == {
        "name", "scratch", "before_start", "before", "base_bytes", "bytes", "maker",
        "lasts", "users_start", "users", "value_name",
    }  # fmt: skip


def line(**parts: Any) -> str:
    return json.dumps(parts) + "\n"


HEAD = line(memplan_graph=1)
MAKES_H = line(op="mm", id="a", makes={"h": 8})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (line(op="mm"), "line 1: the first line does not say memplan_graph"),
        (line(memplan_graph=2), "line 1: version 2 of the format"),
        (line(memplan_graph=1, base_bytes=-1), "line 1: Expected `int` >= 0"),
        ("[1]\n", "line 1: not a JSON object"),
        (HEAD + line(name="mm"), "line 2: neither an operator"),
        (HEAD + '{"op": "mm", "ma', "line 2: not JSON: .*; is the file cut off?"),
        (HEAD + "[" * 200_000, "line 2: not JSON: maximum recursion depth"),
        (
            HEAD + '{"op": "mm", "scratch": ' + "9" * 5000 + "}",
            "line 2: ",
        ),
        (HEAD.encode() + b'{"op": "\xff"}', "line 2: not JSON: "),
        (HEAD + line(op="mm", inputs=[]), 'line 2: "mm": Object contains unknown field `inputs`'),
        (HEAD + line(op="mm", scratch=-4), 'line 2: "mm": Expected `int` >= 0'),
        (HEAD + line(op="mm", makes={"h": 1.5}), 'line 2: "mm": the bytes of "h" are not a whole'),
        (HEAD + line(value="w", bytes=True), 'line 2: "w": Expected `int`, got `bool`'),
        (HEAD + line(value="", bytes=1), "line 2: Expected `str` of length >= 1"),
        (
            HEAD + line(op="mm", makes={"g": 1, "h": 1 << 61}),
            'line 2: "mm": the bytes of "h" are not',
        ),
        (HEAD + '{"op": "mm", "makes": {"h": NaN}}', "line 2: not JSON: "),
        (line(memplan_graph=1, operators=-3), "line 1: Expected `int` >= 0"),
        (
            HEAD + line(value="a", bytes=MAX_TOTAL_BYTES) + line(op="mm", scratch=1),
            f"line 3: more than {MAX_TOTAL_BYTES} bytes together",
        ),
        (HEAD + MAKES_H + line(value="h", bytes=8), 'line 3: value "h" is there already: line 2'),
        (HEAD + MAKES_H + line(op="add", id="a"), 'line 3: id "a" is there already: line 2'),
        (HEAD + line(op="mm", lasts=["h"]), 'line 2: operator "mm" does not make "h"'),
        (
            HEAD + line(op="mm", makes={"h": 8}, uses=["h"]),
            'line 2: operator "mm" uses "h", which it makes itself',
        ),
        (HEAD + line(op="mm", uses=["x"]), 'line 2: operator "mm" uses "x", which nothing makes'),
        (
            HEAD + line(op="mm", after=["x"]),
            'line 2: operator "mm" is to run after "x": no such id',
        ),
        (HEAD + line(op="mm", id="a", after=["a"]), 'line 2: operator "mm" needs "mm" of line 2'),
        (
            HEAD + line(op="add", uses=["h"]) + MAKES_H,
            'line 2: operator "add" needs "mm" of line 3',
        ),
        (
            line(memplan_graph=1, operators=3) + MAKES_H,
            "line 2: 1 operators and not 3, as the first line says",
        ),
    ],
)
def test_faults_name_the_line(tmp_path: Path, text: str | bytes, fault: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(FormatError, match=fault) as error:
        load_graph(path)
    assert str(path) in error.value.message and error.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_graph(tmp_path / "no.jsonl")
