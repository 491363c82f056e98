"""A container of Python values, and what it held when a step was captured."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from memplan.runtime.compiled import python_items as items


class Node:
    """A container, and what it held."""

    __slots__ = (
        "compare", "expected", "grows", "items", "owner", "quick", "read", "tensors", "where",
    )  # fmt: skip

    def __init__(
        self,
        where: str,
        read: Callable[[], dict[Any, Any]],
        quick: Callable[[], Collection[Any]] | None = None,
        compare: Callable[[Any, Any], bool] = operator.is_,
        owner: int = 0,
        grows: bool = False,
    ) -> None:
        """`read` gives its items now, as pairs of key and value; `quick` their values alone, in the
        same order, where that takes less time. `owner`: the id of the dict itself, if it is one.
        `grows`: it is a cache, in which new items are no change to who knows the old ones."""
        self.grows = grows
        self.compare = compare
        self.owner = owner
        self.where = where
        self.read = read
        self.quick = quick
        now = read()
        self.items = {key: items.held(value) for key, value in now.items()}
        self.tensors = {
            key: weakref.ref(value) for key, value in now.items() if isinstance(value, torch.Tensor)
        }
        self.expected = tuple(self.items.values())

    def is_same(self) -> bool:
        """Whether each item is the same object; where not, `changes` tells more."""
        if self.quick is None:
            return False
        try:
            now = self.quick()
        except (KeyError, ValueError):
            return False
        return len(now) == len(self.expected) and all(map(self.compare, now, self.expected))

    def changes(self, growth: bool) -> Iterator[tuple[Any, Any, Any]]:
        """Keys with what was there and what is. `growth`: a cache's new items count too."""
        now = self.read()
        for key, before in self.items.items():
            after = now.get(key, items.MISSING)
            if after is not before and not items.same(before, after):
                yield key, before, after
        if len(now) != len(self.items) and (growth or not self.grows):
            for key, after in now.items():
                if key not in self.items:
                    yield key, items.MISSING, after
        if self.owner and [*now] != [*self.items] and now.keys() == self.items.keys():
            yield items.ORDER, [*self.items], [*now]
