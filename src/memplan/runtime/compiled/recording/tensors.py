"""The tensors of a recorded step as nodes: inputs, results, views and constants."""

from __future__ import annotations

import operator
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memplan.runtime.compiled.in_place import GEOMETRY
from memplan.runtime.compiled.known_storages import KnownStorages
from memplan.runtime.compiled.lifting import Found, Places
from memplan.runtime.compiled.lines import refused_at, user_line
from memplan.runtime.compiled.nested import copy_of, geometry_of, key_of, with_paths
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.program import FACTS, By, Facts, Input, Kind, Place, StorageFacts
from memplan.runtime.compiled.recording.step_graph import StepGraph
from memplan.runtime.tape.storages import has_own_dispatch, is_plain

aten = torch.ops.aten
LIFT_COPY = aten.lift_fresh_copy.default


class Tensors:
    """Gives the node of each tensor. One that is not known comes from before the step."""

    def __init__(self, graph: StepGraph, places: Places) -> None:
        self.storages: list[StorageFacts] = []
        self.known = KnownStorages(self.storages)
        self._graph = graph
        self._places = places
        self._given: dict[fx.Node, weakref.ref[torch.Tensor]] = {}
        """Of a placeholder: the tensor that it stood for."""
        self._memory: list[tuple[int, int]] = []
        """Of the inputs' storages: addresses, half-open."""

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Raises NotCapturable for a tensor that the next step could not find."""
        check_plain(tensor)
        found = self.known.live.get(tensor.untyped_storage()._cdata)
        if found is None:
            self._lift(tensor)
            found = self.known.live[tensor.untyped_storage()._cdata]
        key = key_of(tensor)
        node = self.known.views[found.index].get(key)
        if node is None:
            node = self._view(found.index, tensor)
            self.known.views[found.index][key] = node
        return node

    def register(self, node: fx.Node, result: Any, name: str) -> tuple[int, ...]:
        """Knows the tensors of a node's result, and the nodes that give them.

        Gives the storages that the node makes; `name` is what people call them.
        """
        made = []
        several = not isinstance(result, torch.Tensor)
        for path, tensor in with_paths(result):
            key = tensor.untyped_storage()._cdata
            if key not in self.known.live:
                made.append(self.known.add(tensor, node, name))
            index = self.known.live[key].index
            geometry = key_of(tensor)
            if geometry in self.known.views[index]:
                continue
            source = node
            if several:
                for item in path:
                    source = self._graph.free(operator.getitem, (source, item))
            self.known.of[source] = index
            self.known.views[index][geometry] = source
            source.meta[GEOMETRY] = geometry_of(tensor)
        return tuple(made)

    def constant(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """A tensor made from Python data: each step gets a copy of its own."""
        if not tensor.untyped_storage().resizable():
            raise NotCapturable(
                "a tensor on memory that is not PyTorch's, as of NumPy",
                refused_at(),
                "pass it to the step as an argument",
            )
        if self.known.has(result):
            return
        check_plain(result)
        node = self._graph.placeholder()
        copy = copy_of(result)
        place = Place("a constant", By.HELD, copy)
        held = self.known.add(copy, node, "a constant")
        self.known.of[node] = held
        self._graph.inputs.append(
            Input(node.name, Kind.CONSTANT, place, held, geometry_of(copy), copy.device)
        )
        made = self._graph.call(LIFT_COPY, (node,), effect=True)
        storages = self.register(made, result, "torch.tensor")
        self.known.fixed.update(storages)
        made.meta[FACTS] = Facts(reads=(held,), uses=(held,), makes=storages, source=user_line())

    def is_input(self, node: fx.Node, tensor: torch.Tensor) -> bool:
        """Whether a placeholder gives the tensor itself, and not only what lies in its place."""
        found = self._given.get(node)
        return found is not None and found() is tensor

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the same in each step."""
        found = self.known.live.get(tensor.untyped_storage()._cdata)
        return found is not None and found.index in self.known.fixed

    def alias(self, node: fx.Node) -> fx.Node:
        """A node's tensor as another one on the same memory."""
        made = self._graph.free(aten.alias.default, (node,))
        self.known.of[made] = self.known.of[node]
        return made

    def note_results(self) -> None:
        """Writes into each node's facts which storage it shows."""
        for node in self._graph.fx.nodes:
            if node in self.known.of:
                node.meta[FACTS] = replace(node.meta[FACTS], shows=self.known.of[node])

    def _view(self, index: int, tensor: torch.Tensor) -> fx.Node:
        """Another view of a storage, where no op was seen to make it."""
        conj, neg = tensor.is_conj(), tensor.is_neg()
        for (dtype, _, _, _, other_conj, other_neg), node in self.known.views[index].items():
            if dtype == tensor.dtype and conj == other_conj and neg == other_neg:
                view = self._graph.free(
                    aten.as_strided.default,
                    (node, list(tensor.size()), list(tensor.stride()), tensor.storage_offset()),
                )
                self.known.of[view] = index
                return view
        raise NotCapturable("a tensor read as another type by means unseen", refused_at())

    def _lift(self, tensor: torch.Tensor) -> None:
        found = self._places.find(tensor)
        if found is None:
            raise NotCapturable(
                f"a tensor {list(tensor.shape)} that is no argument of the step, not of the model "
                "and not of the optimizer, and that no variable of the step holds",
                refused_at(),
                "pass it to the step as an argument",
            )
        self._input(found)

    def _check_memory(self, tensor: torch.Tensor) -> None:
        """Whether no other storage is known that lies over the same memory."""
        if has_own_dispatch(tensor):
            return
        storage = tensor.untyped_storage()
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if first < last and any(first < stop and start < last for start, stop in self._memory):
            raise NotCapturable(
                "two tensors over the same memory with a storage each, as of one NumPy array",
                refused_at(),
                "make one of them a view of the other",
            )
        self._memory.append((first, last))

    def _input(self, found: Found) -> None:
        """A tensor from before the step becomes an input."""
        tensor = found.tensor
        node = self._graph.placeholder()
        storage = self.known.live.get(tensor.untyped_storage()._cdata)
        if storage is None:
            self._check_memory(tensor)
        index = self.known.add(tensor, node, found.place.path) if storage is None else storage.index
        self.known.of[node] = index
        self._given[node] = weakref.ref(tensor)
        self.known.views[index].setdefault(key_of(tensor), node)
        self._graph.inputs.append(
            Input(
                node.name,
                found.kind,
                found.place,
                index,
                geometry_of(tensor),
                tensor.device,
                tensor.requires_grad,
            )
        )


def check_plain(tensor: torch.Tensor) -> None:
    """Raises NotCapturable for what is more than a view of a storage."""
    if not is_plain(tensor):
        raise NotCapturable(
            f"a {'nested ' if tensor.is_nested else ''}tensor of type {type(tensor).__name__}, "
            f"layout {tensor.layout}",
            refused_at(),
        )
