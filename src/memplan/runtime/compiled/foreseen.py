"""Values that get out of tensors, and that can be looked up before a step begins.

A step may branch on a value that little work leads to: whether a mask has padding (`mask.all()`),
the number of classes among the labels (`F.one_hot`), an optimizer's count of steps (RAdam). What
leads from the step's inputs to such a value is a slice of its graph. The slices of a program are
run before each call, on copies of what they write, and the program serves where every value is the
one that it was recorded with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.runtime.compiled.execute import Executable
from memplan.runtime.compiled.program import (
    Facts,
    Foreseen,
    Input,
    Kind,
    StepProgram,
    StorageFacts,
    facts_of,
)
from memplan.runtime.tape.replay import copy_of_storage

MOST_NODES = 32
MOST_BYTES = 16 << 20
"""Of the storages that a slice touches."""


@dataclass(frozen=True, eq=False)
class _Escape:
    value: bool | int | float
    what: str
    slice: frozenset[fx.Node]


class Escapes:
    """The values of a step that is being recorded whose slices are small enough."""

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Input], storages: Sequence[StorageFacts]
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._storages = storages
        self._found: dict[fx.Node, _Escape] = {}
        self._writers: dict[int, list[fx.Node]] = {}
        self._last: fx.Node = graph._root
        """The last node whose writes are known."""

    def add(self, node: fx.Node, value: bool | int | float, what: str) -> bool:
        """Whether the value of `node` can be looked up before a step; `what` gets out, in words."""
        if node in self._found:
            return True
        nodes = self._slice(node)
        if nodes is not None and self._may_run_ahead(nodes):
            self._found[node] = _Escape(value, what, frozenset(nodes))
            return True
        return False

    def foreseen(self) -> Foreseen | None:
        """All of them in one graph; None where there are none."""
        if not self._found:
            return None
        needed = frozenset[fx.Node]().union(*(one.slice for one in self._found.values()))
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            if node in needed:
                copied[node] = graph.node_copy(node, lambda other: copied[other])
        graph.output(tuple(copied[node] for node in self._found))
        return Foreseen(
            graph,
            tuple(one.value for one in self._found.values()),
            tuple(one.what for one in self._found.values()),
            frozenset(storage for node in needed for storage in facts_of(node).writes),
        )

    def _slice(self, node: fx.Node) -> list[fx.Node] | None:
        """What leads to a node, it among them; None where that is too much."""
        self._read_on()
        found: dict[fx.Node, None] = {node: None}
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if len(found) > MOST_NODES:
                return None
            for needed in (*at.all_input_nodes, *self._written_before(at)):
                if needed not in found:
                    found[needed] = None
                    waiting.append(needed)
        return list(found)

    def _written_before(self, node: fx.Node) -> Iterator[fx.Node]:
        for storage in _touched(facts_of(node)):
            for writer in self._writers.get(storage, ()):
                if writer is not node and writer < node:
                    yield writer

    def _read_on(self) -> None:
        """Who writes what, of the nodes that have come since it was last asked."""
        for node in _after(self._last):
            self._last = node
            if node.op == "call_function":
                facts = facts_of(node)
                for storage in (*facts.writes, *facts.makes):
                    self._writers.setdefault(storage, []).append(node)

    def _may_run_ahead(self, nodes: list[fx.Node]) -> bool:
        by_name = {one.name: one for one in self._inputs}
        inputs = [by_name[node.name] for node in nodes if node.op == "placeholder"]
        facts = [facts_of(node) for node in nodes]
        touched = {storage for one in facts for storage in _touched(one)}
        touched |= {one.storage for one in inputs} - {-1}
        written = {storage for one in facts for storage in one.writes}
        copied = [one for one in inputs if one.storage in written]
        return (
            not any(one.chains or one.backward for one in facts)
            and not any(one.kind in (Kind.PARAMETER, Kind.GRADIENT) for one in inputs)
            and len(copied) == len({one.storage for one in copied})
            and not any(g.conjugated or g.negated for one in copied if (g := one.geometry))
            and sum(self._storages[storage].bytes for storage in touched) <= MOST_BYTES
        )


class ForeseenValues:
    """Looks a program's foreseen values up."""

    def __init__(self, program: StepProgram) -> None:
        self._foreseen = program.foreseen
        if self._foreseen is None:
            return
        graph = self._foreseen.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        place = {one.name: number for number, one in enumerate(program.inputs)}
        self._places = [place[str(node.target)] for node in inputs]
        self._copied = [
            program.inputs[number].storage in self._foreseen.writes for number in self._places
        ]
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._executable = Executable(nodes, inputs, graph.output_node())

    def difference(self, values: Sequence[Any]) -> str:
        """What is different, in words; empty where nothing is. `values`: of the program's inputs,
        which are left as they are."""
        if self._foreseen is None:
            return ""
        given = [
            _copied(values[number]) if copied else values[number]
            for number, copied in zip(self._places, self._copied, strict=True)
        ]
        try:
            found = self._executable(given)
        except Exception as error:  # the plain step raises it, if it comes to it
            return f"a value it depends on cannot be computed: {error}"
        for now, before, what in zip(
            found, self._foreseen.values, self._foreseen.what, strict=True
        ):
            if not _is_same(now, before):
                return f"{what} gives {now} instead of {before}"
        return ""


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return copy_of_storage(tensor).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    return type(one) is type(other) and bool(one == other)


def _touched(facts: Facts) -> set[int]:
    return {*facts.reads, *facts.uses, *facts.writes, *facts.makes}


def _after(node: fx.Node) -> Iterator[fx.Node]:
    node = node.next
    while node.op != "root":
        yield node
        node = node.next
