"""Which plain Python values a step can read, and which of them have changed.

A compiled step runs tensors' operators and nothing of the user's Python. So the Python values that
it was captured with must be the same at each call, and a step must not change any.
"""

from __future__ import annotations

import enum
import operator
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import eq
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from memplan.runtime.compiled.code_lines import is_of_user, names_in, stores

MOST_NODES = 50_000
_LONGEST = 4096
"""Items of a sequence that are looked at one by one; of a longer one, its length and ends."""
_MISSING = object()
_POSITION = object()
_TENSOR = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
_OPAQUE = (
    "logging", "threading", "concurrent", "multiprocessing", "asyncio", "importlib", "numpy",
    "unittest", "_pytest", "pytest", "pathlib", "re", "weakref", "ctypes", "memplan",
)  # fmt: skip
_TORCH_FOLLOWED = ("torch.nn", "torch.optim", "torch.amp", "torch.cuda.amp")
_ITERATORS: tuple[type, ...] = (
    types.GeneratorType, type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter("")), enumerate, zip, map, filter,
)  # fmt: skip


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


class _Node:
    """A container, and what it held."""

    __slots__ = ("compare", "expected", "items", "owner", "quick", "read", "where")

    def __init__(
        self,
        where: str,
        read: Callable[[], dict[Any, Any]],
        quick: Callable[[], Collection[Any]] | None = None,
        compare: Callable[[Any, Any], bool] = operator.is_,
        owner: int = 0,
    ) -> None:
        """`read` gives its items now, as pairs of key and value; `quick` their values alone, in the
        same order, where that takes less time. `owner`: the id of the dict itself, if it is one."""
        self.compare = compare
        self.owner = owner
        self.where = where
        self.read = read
        self.quick = quick
        self.items = {key: _held(value) for key, value in read().items()}
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

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        now = self.read()
        for key, before in self.items.items():
            after = now.get(key, _MISSING)
            if after is not before and not _same(before, after):
                yield key, before, after
        if len(now) != len(self.items):
            for key, after in now.items():
                if key not in self.items:
                    yield key, _MISSING, after


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
        self._nodes: list[_Node] = []
        self._seen: set[int] = set()
        self._codes: list[types.CodeType] = []
        self._kept: list[object] = []
        self._modules: dict[str, dict[str, Any]] = {}
        self._queue: deque[tuple[str, object]] = deque()
        self._queue.extend(roots.items())
        self._queue.append((getattr(step, "__name__", "step"), step))
        while self._queue and len(self._nodes) < MOST_NODES:
            self._visit(*self._queue.popleft())
        self._watch_modules()

    def let_change(self, owner: object, key: object) -> None:
        """The item of a dict is allowed to differ."""
        self._may_change.add((id(owner), key))

    def changed(self, most: int = 1) -> list[Change]:
        """The first `most` differences between now and when this was made."""
        return list(islice(self._changes(), most))

    def _changes(self) -> Iterator[Change]:
        for node in self._nodes:
            if node.is_same():
                continue
            for key, before, after in node.changes():
                if (node.owner, key) in self._may_change:
                    continue
                where = _join(node.where, key)
                named = node.where if key is _POSITION or not isinstance(key, str) else where
                name = re.split(r"[ .]", named.rstrip("."))[-1].split("[")[0]
                line = stores(self._codes, name)
                yield Change(where, name, _words(before), _words(after), line)

    # Following

    def _visit(self, where: str, value: object) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
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
        elif isinstance(value, dict):
            self._dict(where, value)
        elif isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value):
            pass  # it cannot change
        elif isinstance(value, (list, tuple, deque)):
            self._add(where, partial(_sequence, value), (lambda: value))
        elif isinstance(value, (set, frozenset)):
            self._add(where, partial(_set, value))
        elif isinstance(value, _ITERATORS) or type(value).__module__ == "itertools":
            self._add(where, partial(_iterator, value))
        elif not isinstance(value, (torch.Tensor, type, types.ModuleType)) and _is_followed(value):
            self._add(where, lambda: vars(value), vars(value).values)
            self._class(where, type(value))

    def _add(
        self,
        where: str,
        read: Callable[[], dict[Any, Any]],
        quick: Callable[[], Collection[Any]] | None = None,
        owner: int = 0,
    ) -> None:
        node = _Node(where, read, quick, owner=owner)
        self._nodes.append(node)
        self._queue.extend((_join(where, key), value) for key, value in node.items.items())

    def _dict(self, where: str, value: dict[Any, Any]) -> None:
        self._add(where, partial(_by_key, value), value.values, id(value))

    def _module(self, where: str, module: torch.nn.Module) -> None:
        own = vars(module)
        self._seen.update(id(own[key]) for key in _APART)
        self._add(where, lambda: own, own.values)
        self._add(where, partial(_by_key, own["_modules"]), own["_modules"].values)
        self._modules[where] = own
        self._class(where, type(module))

    def _watch_modules(self) -> None:
        """What all modules have in dicts of their own, at once."""
        parameters = [own["_parameters"] for own in self._modules.values()]
        buffers = [own["_buffers"] for own in self._modules.values()]
        hooks = [own[key] for own in self._modules.values() for key in _HOOKS]
        for what, read, quick in (
            ("parameters", _ids, lambda: [id(p) for held in parameters for p in held.values()]),
            ("buffers", _names, lambda: [name for held in buffers for name in held]),
            ("hooks", _hooks, lambda: [hook for held in hooks if held for hook in held.values()]),
        ):
            read_all = partial(_of_all, self._modules, read)
            self._nodes.append(_Node(what, read_all, quick, eq))

    def _optimizer(self, where: str, optimizer: torch.optim.Optimizer) -> None:
        own = vars(optimizer)
        self._seen.update((id(optimizer.state), id(optimizer.param_groups)))
        self._add(where, lambda: own, own.values)
        self._add(f"{where}.param_groups", partial(_sequence, optimizer.param_groups))
        self._add(f"{where}.state", partial(_optimizer_state, optimizer))
        for group in optimizer.param_groups:
            held = group["params"]
            self._seen.add(id(held))
            self._nodes.append(
                _Node(
                    f"{where} (parameters)",
                    partial(_ids_by_place, held),
                    partial(_ids_in, held),
                    eq,
                )
            )

    def _class(self, where: str, cls: type) -> None:
        """Methods of the user's own classes read globals and closures too."""
        for base in cls.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            for name, method in vars(base).items():
                function = getattr(method, "__func__", getattr(method, "fget", method))
                if isinstance(function, types.FunctionType) and is_of_user(function):
                    self._queue.append((f"{base.__name__}.{name}", function))

    def _function(self, where: str, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._queue.append((where, wrapped))
        if function.__closure__:
            cells = function.__closure__
            self._add(
                f"{function.__name__}'s",
                partial(_cells, function),
                lambda: [cell.cell_contents for cell in cells],
            )
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                self._queue.append((f"a default of {function.__name__}", defaults))
        if not is_of_user(function):
            return
        self._codes.append(function.__code__)
        names = names_in(function.__code__)
        space = function.__globals__
        self._globals("", space, names)
        for name in names & space.keys():
            if isinstance(space[name], types.ModuleType) and is_of_user(space[name]):
                self._globals(f"{name}.", vars(space[name]), names)

    def _globals(self, prefix: str, space: dict[str, Any], names: set[str]) -> None:
        here = [name for name in names if name in space]
        self._add(
            f"global {prefix}", partial(_some, space, here), partial(_some_values, space, here)
        )


def _held(value: Any) -> Any:
    """What to keep of a value: not a tensor, whose memory is the step's business."""
    return _TENSOR if isinstance(value, torch.Tensor) else value


def _same(before: Any, after: Any) -> bool:
    """Whether two values that are not one object come to the same. Containers and objects that are
    others than before do not, but for those that a step makes anew: small, plain ones."""
    if before is _TENSOR or before is _MISSING or after is _MISSING:
        return before is _TENSOR and isinstance(after, torch.Tensor)
    if type(before) is not type(after):
        return False
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) <= _LONGEST and all(
            one is two or _same(_held(one), two) for one, two in zip(before, after, strict=True)
        )
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            _same(_held(value), after[key]) for key, value in before.items()
        )
    if isinstance(before, types.MethodType):
        return bool(before == after)
    if isinstance(before, float):
        return before == after or (before != before and after != after)
    if isinstance(before, (*_PLAIN, torch.Size, torch.dtype, torch.device, range, slice)):
        return bool(before == after)
    return before is after


def _by_key(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key if isinstance(key, _PLAIN) else id(key): item for key, item in value.items()}


def _some(value: dict[Any, Any], names: list[Any]) -> dict[Any, Any]:
    return {name: value[name] for name in names if name in value}


def _some_values(value: dict[Any, Any], names: list[Any]) -> list[Any]:
    return [value[name] for name in names]


def _sequence(value: Any) -> dict[Any, Any]:
    if len(value) <= _LONGEST:
        return dict(enumerate(value))
    return {"length": len(value), 0: value[0], len(value) - 1: value[-1]}


def _set(value: Any) -> dict[Any, Any]:
    return {repr(item): None for item in value}


def _iterator(value: Any) -> dict[Any, Any]:
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        plain = [repr(v) for v in frame.f_locals.values() if isinstance(v, _PLAIN)] if frame else []
        return {_POSITION: (frame.f_lasti if frame else -1, *plain)}
    try:
        _, arguments, *state = value.__reduce__()
    except (TypeError, AttributeError, ValueError):
        return {_POSITION: operator.length_hint(value, -1)}
    return {_POSITION: state[0] if state else repr(arguments)}


_HOOKS = tuple(key for key in vars(torch.nn.Module()) if "hooks" in key)
_APART = (*_HOOKS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _of_all(
    modules: dict[str, dict[str, Any]], read: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[Any, Any]:
    """What `read` gives of each module's attributes, by the module's name."""
    return {
        f"{where}.{name}": value
        for where, own in modules.items()
        for name, value in read(own).items()
    }


def _ids(own: dict[str, Any]) -> dict[str, Any]:
    return {name: id(item) for name, item in own["_parameters"].items()}


def _ids_in(parameters: list[Any]) -> list[int]:
    return [id(parameter) for parameter in parameters]


def _ids_by_place(parameters: list[Any]) -> dict[Any, Any]:
    return dict(enumerate(_ids_in(parameters)))


def _names(own: dict[str, Any]) -> dict[str, Any]:
    return {name: name for name in own["_buffers"]}


def _hooks(own: dict[str, Any]) -> dict[str, Any]:
    return {f"{key}[{number}]": hook for key in _HOOKS for number, hook in own.get(key, {}).items()}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Plain values in it; tensors are the step's own."""
    return {
        (id(parameter), key): value
        for parameter, state in optimizer.state.items()
        if isinstance(state, dict)
        for key, value in state.items()
        if not isinstance(value, torch.Tensor)
    }


def _cells(function: types.FunctionType) -> dict[Any, Any]:
    cells = function.__closure__ or ()
    values = {}
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            values[name] = _MISSING
    return values


def _is_followed(value: object) -> bool:
    if not hasattr(value, "__dict__") or isinstance(value, LRScheduler):
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
    if key is _POSITION:
        return f"the position of {where}, an iterator"
    if where.endswith("'s"):
        return f"{where} {key}"
    if isinstance(key, str) and key.isidentifier():
        return f"{where}.{key}"
    return f"{where}[{key!r}]"


def _words(value: object) -> str:
    if value is _MISSING:
        return "not there"
    if value is _TENSOR or isinstance(value, torch.Tensor):
        return "a tensor"
    text = repr(value) if isinstance(value, (*_PLAIN, list, tuple)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "…"
