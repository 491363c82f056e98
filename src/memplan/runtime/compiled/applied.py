"""A captured step that is run in its order, and what is said when it fails in the middle."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memplan.runtime.compiled.execute import Executable
from memplan.runtime.compiled.guards import Guards
from memplan.runtime.compiled.ordering import Ordering
from memplan.runtime.compiled.program import Kind, StepProgram, facts_of


class OutOfMemoryUnharmed(Exception):  # noqa: N818 - not an error of the user's
    """Out of memory, before anything that outlives the step was changed."""


class AppliedProgram:
    """A program, its guards and its order."""

    def __init__(
        self, program: StepProgram, guards: Guards, ordering: Ordering, recomputed: int = 0
    ) -> None:
        graph = program.graph_module.graph
        self.program = program
        self.guards = guards
        self.ordering = ordering
        self.recomputed = recomputed
        self.calls = 0
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._executable = Executable(ordering.nodes, inputs, graph.output_node())
        self._kind_of = {one.storage: one.kind for one in program.inputs if one.storage >= 0}
        self._generators = _generators(program)
        freed = {(id(place.owner), place.key) for place in program.frees}
        self._spends = any((id(one.place.owner), one.place.key) in freed for one in program.inputs)
        """Whether it reads gradients that it frees: then no plain step can take its place."""

    def run(self, values: list[Any]) -> Any:
        """One step; what it returns. `values` is emptied.

        Raises OutOfMemoryUnharmed; and what operators raise, with a note that says what the step
        had changed by then.
        """
        program = self.program
        drawn = [generator.clone_state() for generator in self._generators]
        for place in program.frees:
            place.clear()
        try:
            outputs = self._executable(values)
        except BaseException as error:
            values.clear()
            self._explain(error, drawn)
            raise
        program.store(outputs)
        for effect in program.effects:
            effect()
        self.calls += 1
        return program.result_of(outputs)

    def _explain(self, error: BaseException, drawn: Sequence[torch.Generator]) -> None:
        place = self._executable.failed_at(error)
        if place is None:
            return
        nodes = self._executable.nodes
        changed = self._changed_by(nodes[: place + 1])
        if not changed and not self._spends and _is_out_of_memory(error):
            for generator, state in zip(self._generators, drawn, strict=True):
                generator.set_state(state.get_state())
            traceback.clear_frames(error.__traceback__)  # they hold what was made so far
            raise OutOfMemoryUnharmed(str(error).split("\n")[0]) from None
        node = nodes[place]
        source = facts_of(node).source
        error.add_note(
            f"memplan: the compiled step failed in its operator {place + 1} of {len(nodes)}, "
            f"{node.target}{f' of {source}' if source else ''}. "
            + (
                f"By then it had changed {changed}: the step is half done. Load the last checkpoint"
                if changed
                else "Nothing that outlives the step had been changed, but for freed gradients"
            )
        )

    def _changed_by(self, nodes: Sequence[fx.Node]) -> str:
        """What lasts beyond the step and is written by these nodes, in words."""
        written = {storage for node in nodes for storage in facts_of(node).writes}
        counts = Counter(
            kind
            for storage in written
            if (kind := self._kind_of.get(storage)) not in (None, Kind.CONSTANT)
        )
        return ", ".join(
            f"{count} {'tensors of ' if kind in _UNCOUNTED else ''}{kind}"
            + ("s" if count > 1 and kind not in _UNCOUNTED else "")
            for kind, count in counts.items()
        )


_UNCOUNTED = (Kind.OPTIMIZER_STATE, Kind.REACHED)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _generators(program: StepProgram) -> list[torch.Generator]:
    """The generators that the step may draw from."""
    nodes = program.graph_module.graph.nodes
    if not any(facts_of(node).chains for node in nodes if node.op == "call_function"):
        return []
    devices = {storage.device for storage in program.storages if storage.device.type == "cuda"}
    return [
        torch.default_generator,
        *(torch.cuda.default_generators[device.index or 0] for device in devices),
        *(
            one.place.owner
            for one in program.inputs
            if isinstance(one.place.owner, torch.Generator)
        ),
    ]
