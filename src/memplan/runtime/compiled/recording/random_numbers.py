"""What a recorded step draws: from which generator, and where Python reads or sets its state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memplan.runtime.compiled.generators import (
    Generators,
    address_of,
    chain_of,
    chain_of_own,
    is_default,
)
from memplan.runtime.compiled.lines import refused_at, user_line
from memplan.runtime.compiled.nested import key_of, tensors_in
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.op_limits import HIDDEN_STATE, KNOWN
from memplan.runtime.compiled.program import FACTS, By, Facts, Input, Kind, Place
from memplan.runtime.compiled.random_state import read_random_state, write_random_state
from memplan.runtime.compiled.recording.step_graph import StepGraph
from memplan.runtime.compiled.recording.tensors import Tensors
from memplan.runtime.tape.replayable import Traits


class RandomNumbers:
    """Keeps in order what must not change places."""

    def __init__(self, graph: StepGraph, tensors: Tensors, own: Iterable[torch.Generator]) -> None:
        """`own`: generators that were there before the step, but for the devices' defaults."""
        self.states = Generators(own)
        self._graph = graph
        self._tensors = tensors
        self._nodes: dict[int, fx.Node] = {}

    def node_of(self, generator: torch.Generator) -> fx.Node:
        node = self._nodes.get(address_of(generator))
        if node is None:
            node = self._graph.placeholder()
            place = Place("a random generator", By.HELD, generator)
            self._graph.inputs.append(Input(node.name, Kind.CONSTANT, place))
            self._nodes[address_of(generator)] = node
        return node

    def chains(
        self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, ...]:
        """The chains of an op about to run. Raises NotCapturable where the generator that it draws
        from was moved unseen."""
        if func._opname in HIDDEN_STATE:
            return ("hidden state",)
        if func.namespace not in KNOWN:
            return (f"operators of {func.namespace}",)
        if not traits.draws(args, kwargs):
            return ()
        generator = kwargs.get("generator")
        device = kwargs.get("device") or next((t.device for t in tensors_in(args)), "cpu")
        device = torch.device(device)
        if generator is not None and not is_default(generator):
            chain = chain_of_own(generator)
        else:
            chain = chain_of(device)
        self.states.check(chain)
        return (chain,)

    def read(self, state: torch.Tensor, device: torch.device) -> None:
        """Python has read the state of the default generator."""
        node = self._graph.call(read_random_state, (device,), effect=True)
        known, storages = self._tensors.known, self._tensors.storages
        made = known.add(state, node, "a random state")
        storages[made] = replace(storages[made], bytes=0)  # no operator makes it
        known.views[made][key_of(state)] = node
        known.of[node] = made
        node.meta[FACTS] = Facts(makes=(made,), chains=(chain_of(device),), source=user_line())

    def write(self, state: torch.Tensor, device: torch.device) -> None:
        """Python is about to set the state of the default generator."""
        if not self._tensors.known.has(state):
            raise NotCapturable("a random state from before the step", refused_at())
        given = self._tensors.node_of(state)
        node = self._graph.call(write_random_state, (given, device), effect=True)
        used = self._tensors.known.of_nodes(given)
        node.meta[FACTS] = Facts(
            reads=used, uses=used, chains=(chain_of(device),), source=user_line()
        )
        self.states.moved(device, state)
