"""Puts recomputation into a captured step: operators of forward run again before the operators of
backward that need their results, which are dropped in between."""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from typing import Any

from torch import fx

from memplan.recompute.selection import Selection
from memplan.runtime.compiled.dependencies import Operators
from memplan.runtime.compiled.passes import Pass, statistics_of
from memplan.runtime.compiled.program import FACTS, Facts, StepProgram, StorageFacts, facts_of
from memplan.runtime.tape.replayable import traits_of

_TWIN = "memplan_again"
"""Key in `node.meta` of what was put in here."""


def with_recomputation(
    operators: Operators, selections: list[tuple[Pass, Selection]]
) -> tuple[StepProgram, int]:
    """The program with the selections of its passes in it, and how many operators run again."""
    program, copied = _copy(operators.program)
    nodes = [copied[node] for node in operators.nodes]
    again = 0
    for one, selection in selections:
        writer = _Replays(program, nodes, one, selection)
        again += writer.write()
    program.graph_module.graph.lint()
    return program, again


def _copy(program: StepProgram) -> tuple[StepProgram, dict[fx.Node, fx.Node]]:
    """A program of the same inputs, with a graph of its own."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(program.graph_module.graph, copied)
    graph.output(output)
    for old, new in copied.items():
        new.meta = copy.copy(old.meta)
    module = fx.GraphModule(program.graph_module, graph)
    storages = [replace(s, maker=copied.get(s.maker, s.maker)) for s in program.storages]
    return replace(program, graph_module=module, storages=storages), copied


class _Replays:
    """The replays of one pass."""

    def __init__(
        self, program: StepProgram, nodes: list[fx.Node], one: Pass, selection: Selection
    ) -> None:
        self._program = program
        self._graph = program.graph_module.graph
        self._nodes = nodes[one.begin : one.end]
        self._pass = one
        self._facts = [facts_of(node) for node in self._nodes]
        number = {storage: value for value, storage in enumerate(one.storages)}
        self._group_of = {
            one.storages[value]: group
            for group, values in enumerate(selection.groups)
            for value in values
        }
        self._groups = [{one.storages[v] for v in group} for group in selection.groups]
        dropped = set(self._group_of)
        alloc, free = one.graph.values.alloc, one.graph.values.free
        forward = one.graph.forward_ops
        made_once = {
            storage
            for facts, again in zip(self._facts[:forward], one.graph.ops.replayable, strict=False)
            if not again
            for storage in (*facts.makes, *facts.writes)
        }
        self._there = {
            storage
            for storage in one.storages
            if storage not in dropped
            and (
                alloc[number[storage]] < 0
                or free[number[storage]] > forward
                or number[storage] in selection.held
                or storage in made_once
            )
        }
        """Kept into backward, or recomputed by now."""
        self._of: dict[int, int] = {}
        """Storages that have been recomputed, and the ones that hold them now."""
        self._twins: dict[tuple[fx.Node, int], fx.Node] = {}
        """Of a node and the storage that stands for its own: the node on it."""

    def write(self) -> int:
        again = 0
        for row in range(self._pass.graph.forward_ops, len(self._nodes)):
            node, facts = self._nodes[row], self._facts[row]
            for group in self._triggered(facts):
                again += self._replay(node, group)
            if any(index in self._of for index in (*facts.reads, *facts.uses)):
                self._rewire(node)
        return again

    def _triggered(self, facts: Facts) -> list[int]:
        """Groups that a backward operator is the first to need, in the order it reads."""
        found: list[int] = []
        for index in (*facts.reads, *facts.uses):
            group = self._group_of.get(index, -1)
            if group >= 0 and index not in self._of and group not in found:
                found.append(group)
        return found

    def _replay(self, before: fx.Node, group: int) -> int:
        """Runs again what makes the group's values, right before a node."""
        members = self._groups[group]
        rows = self._closure(members)
        mapped: dict[int, int] = {}
        """Storages that this replay makes."""
        with self._graph.inserting_before(before):
            for row in rows:
                self._again(row, mapped)
        self._of |= {index: mapped[index] for index in members}
        self._there |= members
        return len(rows)

    def _closure(self, members: set[int]) -> list[int]:
        """Forward rows that make the members out of what is there, in order."""
        forward = self._pass.graph.forward_ops
        writers: dict[int, list[int]] = {}
        for row in range(forward):
            for index in self._writes(row):
                writers.setdefault(index, []).append(row)
        rows: set[int] = set()
        wanted, seen = [(index, forward) for index in members], set(members)
        while wanted:
            index, _ = wanted.pop()
            for row in writers.get(index, ()):
                if row in rows:
                    continue
                rows.add(row)
                facts = self._facts[row]
                for needed in {*facts.reads, *facts.uses, *self._writes(row)}:
                    if needed in seen or needed in self._there:
                        continue
                    if needed in facts.makes:
                        continue
                    seen.add(needed)
                    wanted.append((needed, row))
        return sorted(rows)

    def _writes(self, row: int) -> set[int]:
        """What a row makes or changes, but for running statistics."""
        facts = self._facts[row]
        return {*facts.makes, *facts.writes} - statistics_of(self._nodes[row])

    def _again(self, row: int, mapped: dict[int, int]) -> None:
        node, facts = self._nodes[row], self._facts[row]
        made = {index: self._new_storage(index) for index in facts.makes}
        mapped |= {index: new for index, new in made.items() if index not in self._there}
        inputs = {needed: self._twin(needed, mapped) for needed in node.all_input_nodes}
        statistics = statistics_of(node)
        args = _without_statistics(node) if statistics else node.args
        twin = self._call(node, inputs, args)
        twin.meta[FACTS] = self._mapped(facts, mapped | made, statistics)
        for new in made.values():
            storages = self._program.storages
            storages[new] = replace(storages[new], maker=twin)
        self._note(node, twin, made)

    def _note(self, node: fx.Node, twin: fx.Node, made: dict[int, int]) -> None:
        """From now on the twin shows what the node did; elements of its result too."""
        facts = facts_of(node)
        if facts.shows is not None:
            self._twins[node, made.get(facts.shows, facts.shows)] = twin
        for user in node.users:
            if user.target is operator.getitem and user.args[0] is node and not _is_twin(user):
                element = self._call(user, {node: twin}, user.args)
                element.meta[FACTS] = self._mapped(facts_of(user), made, set())
                self._note(user, element, made)

    def _call(self, node: fx.Node, inputs: dict[fx.Node, fx.Node], args: Any) -> fx.Node:
        args, kwargs = fx.map_arg((args, node.kwargs), lambda needed: inputs[needed])
        made = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = copy.copy(node.meta)
        made.meta[_TWIN] = True
        return made

    def _new_storage(self, index: int) -> int:
        old = self._program.storages[index]
        self._program.storages.append(
            StorageFacts(old.bytes, old.device, old.maker, f"{old.name} again")
        )
        return len(self._program.storages) - 1

    def _mapped(self, facts: Facts, mapped: dict[int, int], without: set[int]) -> Facts:
        def here(indices: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(self._now(index, mapped) for index in indices if index not in without)

        shows = None if facts.shows is None else self._now(facts.shows, mapped)
        return replace(
            facts,
            reads=here(facts.reads),
            writes=here(facts.writes),
            makes=here(facts.makes),
            uses=here(facts.uses),
            shows=shows,
        )

    def _now(self, index: int, mapped: dict[int, int]) -> int:
        return mapped.get(index, self._of.get(index, index))

    def _twin(self, node: fx.Node, mapped: dict[int, int]) -> fx.Node:
        """The node that shows now what a node showed."""
        if node.op == "placeholder":
            return node
        facts, shown = facts_of(node), _shown(node)
        now = None if shown is None else self._now(shown, mapped)
        if now == shown:
            return node
        assert now is not None
        if (found := self._twins.get((node, now))) is not None:
            return found
        assert facts.free, f"{node} was not recomputed"
        inputs = {needed: self._twin(needed, mapped) for needed in node.all_input_nodes}
        made = self._call(node, inputs, node.args)
        made.meta[FACTS] = self._mapped(facts, mapped, set())
        self._twins[node, now] = made
        return made

    def _rewire(self, node: fx.Node) -> None:
        """Gives an operator of backward what was recomputed."""
        with self._graph.inserting_before(node):
            for needed in node.all_input_nodes:
                if (now := self._twin(needed, {})) is not needed:
                    node.replace_input_with(needed, now)
        node.meta[FACTS] = self._mapped(facts_of(node), {}, set())


def _shown(node: fx.Node) -> int | None:
    """The storage that a node's result lies in, be it several views of it: `unbind`, `split`."""
    if node.op == "placeholder":
        return None
    facts = facts_of(node)
    if facts.shows is not None or not facts.free:
        return facts.shows
    shown = (_shown(needed) for needed in node.all_input_nodes)
    return next((storage for storage in shown if storage is not None), None)


def _is_twin(node: fx.Node) -> bool:
    return _TWIN in node.meta


def _without_statistics(node: fx.Node) -> tuple[Any, ...]:
    """Arguments of a batch norm that leaves its running statistics alone."""
    places = traits_of(node.target).statistics
    assert places is not None
    return tuple(None if place in places[:2] else value for place, value in enumerate(node.args))
