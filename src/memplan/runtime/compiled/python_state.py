"""Which plain Python values a step can read, and which of them have changed.

A compiled step runs tensors' operators and nothing of the user's Python. So the Python values that
it was captured with must be the same at each call, and a step must not change any.
"""

from __future__ import annotations

import os
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import eq
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from memplan.runtime.compiled import python_items as items
from memplan.runtime.compiled.code_lines import (
    codes_of,
    compares_types,
    is_of_user,
    is_user_class,
    stores,
)
from memplan.runtime.compiled.named import Space, spaces_of
from memplan.runtime.compiled.python_objects import behind, content_of, is_cache
from memplan.runtime.compiled.watched import Node

MOST_NODES = 50_000
_OPAQUE = (
    "logging", "threading", "concurrent", "multiprocessing", "asyncio", "importlib", "numpy",
    "unittest", "_pytest", "pytest", "pathlib", "re", "ctypes", "memplan",
)  # fmt: skip
_TORCH_FOLLOWED = ("torch.nn", "torch.optim", "torch.amp", "torch.cuda.amp")


@dataclass(frozen=True)
class Change:
    """A Python value that is not what it was."""

    where: str
    name: str
    """The last name in `where`, as code writes it."""
    before: str
    after: str
    line: str = ""
    """`file:line` that changes it, where the step's code shows one."""

    def __str__(self) -> str:
        return f"{self.where} is {self.after} instead of {self.before}"


class PythonState:
    """The plain values that are reachable from a step, its model and its optimizer: attributes of
    modules and of other objects, items of lists and dicts, closure cells, and the globals that the
    code of the step names. Tensors count by being there."""

    def __init__(
        self,
        step: Callable[..., Any],
        roots: dict[str, object],
    ) -> None:
        """`roots`: objects by the name that the user knows them by."""
        self._may_change: set[tuple[int, Any]] = set()
        self._nodes: list[Node] = []
        self._seen: set[int] = set()
        self._codes: list[types.CodeType] = []
        self._kept: list[object] = []
        self._functions: list[types.FunctionType] = []
        self._objects: list[tuple[str, object]] = []
        self._modules: dict[str, dict[str, Any]] = {}
        self._queue: deque[tuple[str, object]] = deque()
        self._queue.extend(roots.items())
        self._queue.append((getattr(step, "__name__", "step"), step))
        for name, everywhere in items.global_hooks():
            self._dict(name, everywhere)
        while self._queue and len(self._nodes) < MOST_NODES:
            self._visit(*self._queue.popleft())
        self._watch_modules()
        self._watch_all(items.functions_by_part, items.parts_of_functions, self._functions)
        self._watch_all(items.types_by_name, items.types_of, self._objects)

    def _watch_all(
        self,
        read: Callable[[Any], dict[Any, Any]],
        quick: Callable[[Any], Collection[Any]],
        what: list[Any],
    ) -> None:
        self._nodes.append(Node("", partial(read, what), partial(quick, what)))

    def let_change(self, owner: object, key: object) -> None:
        """The item of a dict is allowed to differ."""
        self._may_change.add((id(owner), key))

    def changed(self, most: int = 1, *, growth: bool = False) -> list[Change]:
        """The first `most` differences between now and when this was made. `growth`: also what has
        come into caches, by which a step may not have found what it put there."""
        return list(islice(self._changes(growth), most))

    def _changes(self, growth: bool) -> Iterator[Change]:
        for node in self._nodes:
            if node.is_same():
                continue
            for key, before, after in node.changes(growth):
                if (node.owner, key) in self._may_change:
                    continue
                where = _join(node.where, key)
                named = node.where if key is items.POSITION or not isinstance(key, str) else where
                name = re.split(r"[ .]", named.rstrip("."))[-1].split("[")[0]
                line = stores(self._codes, name)
                was, now = items.words(before), items.words(after)
                now = re.sub("^a ", "another ", now) if now == was else now
                yield Change(where, name, was, now, line)

    def compares_types(self) -> str:
        """`file:line` where the user's code asks for a number's type; empty where none does."""
        return next(
            (
                line
                for code in self._codes
                for part in codes_of(code)
                if (line := compares_types(part))
            ),
            "",
        )

    def lost_tensors(self, kept: Collection[int]) -> Iterator[Change]:
        """Tensors that were replaced since this was made, by others than `kept` (ids). Asked once:
        what has been there is forgotten then."""
        for node in self._nodes:
            tensors, node.tensors = node.tensors, {}
            if not tensors:
                continue
            now = node.read()
            for key, reference in tensors.items():
                after = now.get(key)
                same = after is not None and reference() is after
                if isinstance(after, torch.Tensor) and not same and id(after) not in kept:
                    where = _join(node.where, key)
                    name = re.split(r"[ .]", node.where.rstrip("."))[-1].split("[")[0]
                    line = stores(self._codes, name)
                    yield Change(where, name, "a tensor", "another tensor", line)

    # Following

    def _visit(self, where: str, value: object) -> None:
        if type(value) in items.PLAIN or isinstance(value, torch.Tensor) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.optim.Optimizer):
            self._optimizer(where, value)
        elif isinstance(value, torch.nn.Module):
            self._module(where, value)
        elif isinstance(value, partial):
            self._queue.extend((where, part) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._queue.extend((where, part) for part in (value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            self._function(where, value)
        elif isinstance(value, (staticmethod, classmethod)):
            self._queue.append((where, value.__func__))
        elif isinstance(value, property):
            self._queue.append((where, value.fget))
        elif isinstance(value, dict):
            self._dict(where, value)
        elif isinstance(value, (list, tuple, deque)):
            if type(value) is not tuple or not all(isinstance(one, items.PLAIN) for one in value):
                self._add(where, partial(items.sequence, value), (lambda: value))
        elif isinstance(value, (set, frozenset)):
            self._add(where, partial(items.as_set, value))
        elif isinstance(value, torch.amp.GradScaler):
            self._add(where, partial(items.of_scaler, value))
            return
        elif isinstance(value, type):
            self._seen.discard(id(value))
            self._class(value)
            return
        elif (content := content_of(value)) is not None:
            self._add(where, content, grows=is_cache(value))
        self._queue.extend((where, one) for one in behind(value))
        self._attributes(where, value)

    def _attributes(self, where: str, value: object) -> None:
        """What lies in the object itself, of whatever kind it is, and in its class."""
        if isinstance(value, _SEEN_TO) or not _is_followed(value):
            return
        self._objects.append((where, value))
        if hasattr(value, "__dict__"):
            self._add(where, lambda: vars(value), lambda: vars(value).values())
        if slots := items.slots_of(value):
            self._add(where, partial(items.attributes, value, slots))
        self._class(type(value))

    def _add(
        self,
        where: str,
        read: Callable[[], dict[Any, Any]],
        quick: Callable[[], Collection[Any]] | None = None,
        owner: int = 0,
        grows: bool = False,
    ) -> None:
        node = Node(where, read, quick, owner=owner, grows=grows)
        self._nodes.append(node)
        self._queue.extend((_join(where, key), value) for key, value in node.items.items())
        for key, reference in node.tensors.items():
            tensor = reference()
            if tensor is not None and vars(tensor):
                self._add(_join(where, key), partial(items.attributes_at, read, key))

    def _dict(self, where: str, value: dict[Any, Any]) -> None:
        self._add(where, partial(items.by_key, value), value.values, id(value))

    def _module(self, where: str, module: torch.nn.Module) -> None:
        own = vars(module)
        self._seen.update(id(own[key]) for key in items.APART)
        self._add(where, lambda: own, own.values)
        self._add(where, partial(items.by_key, own["_modules"]), own["_modules"].values)
        self._modules[where] = own
        self._class(type(module))

    def _watch_modules(self) -> None:
        """What all modules have in dicts of their own, at once."""
        parameters = [own["_parameters"] for own in self._modules.values()]
        for where, own in self._modules.items():
            for name, tensor in own["_parameters"].items():
                if tensor is not None and vars(tensor):
                    reference = weakref.ref(tensor)
                    self._nodes.append(
                        Node(f"{where}.{name}", partial(items.of_referent, reference))
                    )
        for where, own in self._modules.items():
            for name, tensor in own["_buffers"].items():
                if tensor is not None and vars(tensor):
                    read_it = partial(items.attributes_at, own["_buffers"].copy, name)
                    self._nodes.append(Node(f"{where}.{name}", read_it))
        buffers = [own["_buffers"] for own in self._modules.values()]
        hooks = [own[key] for own in self._modules.values() for key in items.HOOKS]
        for what, read, quick in (
            (
                "parameters",
                items.ids,
                lambda: [id(p) for held in parameters for p in held.values()],
            ),
            (
                "hooks on the gradients",
                items.tensor_hooks,
                lambda: [items.hooks_on(p) for held in parameters for p in held.values()],
            ),
            ("buffers", items.names, lambda: [name for held in buffers for name in held]),
            (
                "hooks",
                items.hooks,
                lambda: [hook for held in hooks if held for hook in held.values()],
            ),
        ):
            read_all = partial(items.of_all, self._modules, read)
            self._nodes.append(Node(what, read_all, quick, eq))

    def _optimizer(self, where: str, optimizer: torch.optim.Optimizer) -> None:
        own = vars(optimizer)
        self._seen.update((id(optimizer.state), id(optimizer.param_groups)))
        self._add(where, lambda: own, own.values)
        self._add(f"{where}.param_groups", partial(items.sequence, optimizer.param_groups))
        self._add(f"{where}.state", partial(items.plain_state, optimizer))
        read, quick = partial(items.state_ids, optimizer), partial(items.ids_of_state, optimizer)
        self._nodes.append(Node(f"{where}.state (as a dict)", read, quick, eq))
        for group in optimizer.param_groups:
            held = group["params"]
            self._seen.add(id(held))
            self._nodes.append(
                Node(
                    f"{where} (parameters)",
                    partial(items.ids_by_place, held),
                    partial(items.ids_in, held),
                    eq,
                )
            )

    def _class(self, cls: type) -> None:
        """The user's own classes have attributes, and methods that read globals and closures."""
        for base in cls.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            if is_user_class(base):
                read, quick = partial(items.of_class, base), vars(base).values
                self._add(base.__name__, read, quick)
            elif methods := [name for name in ("forward", "step") if name in vars(base)]:
                read = partial(items.attributes, base, methods)
                self._nodes.append(Node(base.__name__, read))

    def _function(self, where: str, function: types.FunctionType) -> None:
        self._functions.append(function)
        if function.__closure__:
            cells = function.__closure__
            self._add(
                f"{function.__name__}'s",
                partial(items.cells, function),
                lambda: [cell.cell_contents for cell in cells],
            )
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                self._queue.append((f"a default of {function.__name__}", defaults))
        if not is_of_user(function):
            return
        self._codes.append(function.__code__)
        for space in spaces_of(function):
            read = partial(items.some, space.holds, space.names)
            quick = partial(items.some_values, space.holds, space.names)
            if space.of_user:
                self._add(f"global {space.prefix}", read, quick)
            else:
                self._library(space, read, quick)

    def _library(self, space: Space, read: Any, quick: Any) -> None:
        """What a library's functions are, which the user may replace; not what they use."""
        self._nodes.append(Node(space.prefix, read, quick))
        if space.holds is vars(sys) and "argv" in space.names:
            self._queue.append(("sys.argv", sys.argv))
        if space.prefix == "os." and {"environ", "getenv"} & {*space.names}:
            self._dict("os.environ", vars(os.environ)["_data"])


_SEEN_TO = (torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.MethodType)
"""Objects whose attributes are looked at by kind."""


def _is_followed(value: object) -> bool:
    if isinstance(value, LRScheduler) or not (hasattr(value, "__dict__") or items.slots_of(value)):
        return False  # a scheduler in the step is called again after it; see `capture`
    home = type(value).__module__
    if home.split(".")[0] == "torch":
        return home.startswith(_TORCH_FOLLOWED)
    return home.split(".")[0] not in _OPAQUE and value is not sys.modules.get(home)


def _join(where: str, key: Any) -> str:
    if key == "_modules":
        return where
    if where == "global " or (where.startswith("global ") and where.endswith(".")):
        return f"{where}{key}"
    if key is items.POSITION:
        return f"the position of {where}, an iterator"
    if key is items.ORDER:
        return f"the order of {where}"
    if not where:
        return str(key)
    if isinstance(key, tuple):  # of a set's item, with its type, or of a parameter's state
        return f"{where}[{key[-1]!r}]"
    if where.endswith("'s"):
        return f"{where} {key}"
    if isinstance(key, str) and key.isidentifier():
        return f"{where}.{key}"
    return f"{where}[{key!r}]"
