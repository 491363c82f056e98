"""Which storages a recorded step has seen, and which node gives which view of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx

from memplan.runtime.compiled.nested import Key, key_of, nodes_in
from memplan.runtime.compiled.program import StorageFacts


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("index", "key")
    index: int
    key: int


class KnownStorages:
    """Storages by number, in `storages`; the living ones by their address."""

    def __init__(self, storages: list[StorageFacts]) -> None:
        self.storages = storages
        self.live: dict[int, _StorageRef] = {}
        self.views: list[dict[Key, fx.Node]] = []
        """Of each storage: the node of each view of it."""
        self.of: dict[fx.Node, int] = {}
        """The storage that a node's tensor is on."""
        self.fixed: set[int] = set()
        """Storages whose content is the same in each step: `torch.arange(8)`."""

    def add(self, tensor: torch.Tensor, maker: fx.Node, name: str) -> int:
        storage = tensor.untyped_storage()
        reference = _StorageRef(storage, self._died)
        reference.key = storage._cdata
        reference.index = len(self.storages)
        self.live[reference.key] = reference
        self.storages.append(StorageFacts(storage.nbytes(), tensor.device, maker, name))
        self.views.append({})
        return reference.index

    def _died(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(storage, _StorageRef)
        if self.live.get(storage.key) is storage:
            del self.live[storage.key]

    def has(self, tensor: torch.Tensor) -> bool:
        found = self.live.get(tensor.untyped_storage()._cdata)
        return found is not None and key_of(tensor) in self.views[found.index]

    def is_fixed(self, mapped: Any, like: bool = False) -> bool:
        """Whether arguments are the same in each step. `like`: only shapes of tensors matter."""
        for node in nodes_in(mapped):
            index = self.of.get(node)
            if index is None or not (like or index in self.fixed):
                return False
        return True

    def of_nodes(self, mapped: Any) -> tuple[int, ...]:
        seen: dict[int, None] = {}
        for node in nodes_in(mapped):
            index = self.of.get(node)
            if index is not None:
                seen[index] = None
        return tuple(seen)
