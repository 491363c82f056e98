"""`memplan.register_rule`: the rules that users give, and where they act."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, overload

import torch
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from memplan.capturing.operators.fake import forget_written
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.standins import rules as rules_module
from memplan.capturing.standins.rule_errors import place_of
from memplan.capturing.standins.rules import Call, Rule
from memplan.capturing.state import CaptureState, Handler
from memplan.types.errors import UsageError

_PYTORCHS = frozenset({"aten", "prims", "prim", "c10d", "_c10d_functional", "quantized"})
"""Namespaces of operators that are there wherever PyTorch is."""
_rules: dict[str, Rule] = {}
"""Rules by the name for which they were registered."""
_actors: list[RuleActor] = []


@overload
def register_rule(
    name: str, function: None = None, *, source: str = ""
) -> Callable[[Callable[..., Any]], Rule]: ...


@overload
def register_rule(name: str, function: Callable[..., Any], *, source: str = "") -> Rule: ...


def register_rule(
    name: str, function: Callable[..., Any] | None = None, *, source: str = ""
) -> Any:
    """Say what an operator or function that only a GPU runs takes of its memory.

    `name` is an operator of `torch.ops` (`"my_ext::attention"`), or the dotted name of a Python
    function, method or Triton kernel (`"my_ext.attention"`); the package need not be installed.
    `function(call, ...)` takes what the real one takes, after a `Call`, and returns what the real
    one returns, made with `torch.empty` and its kin. `call.save(...)` keeps for the backward pass,
    `call.workspace(bytes, low, high)` is memory the kernel takes for itself. `source` says where
    the numbers come from, and is shown in the estimate. A decorator when `function` is left out;
    the `Rule` that it gives has a decorator `backward` for what the backward pass makes.

    Raises UsageError for a name that is neither kind, for an operator that PyTorch should have and
    does not, for a second rule of the same name, and for a function that takes no call.
    """
    if function is None:
        return partial(register_rule, name, source=source)
    namespace, colons, operator = name.partition("::")
    parts = [namespace, *operator.split(".")] if colons else name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise UsageError(
            f"{name!r} names neither an operator nor a function",
            'write "namespace::operator" or "package.module.function"',
        )
    rule = function if isinstance(function, Rule) else Rule(name, function, source)
    if colons:
        _check_exists(namespace, operator)
    _check_alone(name, rule)
    _rules[name] = rule
    for actor in _actors:
        actor.add(name, rule)
    return rule


def _check_exists(namespace: str, operator: str) -> None:
    operator = operator.partition(".")[0]
    if namespace not in _PYTORCHS or _packet(namespace, operator) is not None:
        return
    names = {name.partition("::")[2].partition(".")[0] for name in _operators(namespace)}
    close = difflib.get_close_matches(operator, names, 3)
    raise UsageError(
        f"PyTorch has no operator {namespace}::{operator}",
        f"did you mean {' or '.join(f'{namespace}::{name}' for name in close)}?" if close else "",
    )


def _operators(namespace: str) -> list[str]:
    return [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::")]


def _check_alone(name: str, rule: Rule) -> None:
    """A cell of a notebook, or a file of rules, may be run again."""
    before = _rules.get(name)
    places = [place_of(item.function) for item in (before, rule) if item is not None]
    if before is None or before is rule or places[0] == places[1]:
        return
    if all(place and not _is_cell(place) for place in places):
        raise UsageError(f"two rules for {name}: {places[0]} and {places[1]}", "keep one of them")


def _is_cell(place: str) -> bool:
    return place.startswith("<") or "ipykernel" in place


def function_names() -> Iterator[str]:
    """Dotted names of Python functions with rules."""
    return (name for name in list(_rules) if "::" not in name)


def unused(used: Iterable[str]) -> list[tuple[str, str]]:
    """Names of users' rules that are not among those `used`, and where each stands."""
    names = set(used)
    return [
        (name, place_of(rule.function))
        for name, rule in _rules.items()
        if rule.name not in names and name not in names
    ]


def rule_for_function(name: str) -> Rule | None:
    return _rules.get(name)


def rules_of_module(module: str) -> dict[str, Rule]:
    """Rules for the functions of a module, by the functions' names."""
    found = ((name.rpartition("."), rule) for name, rule in _rules.items())
    return {parts[2]: rule for parts, rule in found if parts[0] == module}


class RuleActor:
    """Puts rules in place of what they are for, for one capture."""

    def __init__(self, state: CaptureState, patches: Patches, watcher: ImportWatcher) -> None:
        self.state = state
        self.patches = patches
        self.watcher = watcher

    def start(self, built_in: dict[str, Rule]) -> None:
        """Start with built-in rules; those of users take precedence."""
        for name, rule in {**built_in, **_rules}.items():
            self.add(name, rule)
        _actors.append(self)
        rules_module._captures.append(self.state)

    def stop(self) -> None:
        """No rule acts any more."""
        _actors.remove(self)
        rules_module._captures.remove(self.state)

    def add(self, name: str, rule: Rule) -> None:
        """Let a rule act from now on."""
        if "::" in name:
            self._add_operator(name, rule)
            return
        parts = name.split(".")
        for length in range(1, len(parts)):
            module = ".".join(parts[:length])
            self.watcher.add(module, partial(self._replace, parts[length:], rule))

    def _replace(self, path: list[str], rule: Rule, module: ModuleType) -> None:
        owner: Any = module
        for part in path[:-1]:
            owner = vars(owner).get(part) if hasattr(owner, "__dict__") else None
            if owner is None or isinstance(owner, ModuleType):
                return
        stand_in = len(path) == 1 and getattr(module.__spec__, "origin", None) is None
        if path[-1] in vars(owner) or stand_in:
            self.patches.set(owner, path[-1], rule)

    def _add_operator(self, name: str, rule: Rule) -> None:
        namespace, _, operator = name.partition("::")
        operator, _, _ = operator.partition(".")
        packet = _packet(namespace, operator)
        self.state.rules[name] = _handler(rule)
        if packet is None or rule.of_backward is not None:
            # Absent here, or differentiated by the rule: taken before the dispatcher.
            face = RuledOperator(rule, namespace, operator)
            self.patches.set(getattr(torch.ops, namespace), operator, face, new=True)
        for known in list(self.state.handlers):
            if self.state.handlers[known] is None:
                del self.state.handlers[known]


_packets: dict[tuple[str, str], Any] = {}
"""Kept for the life of the process: C++ remembers the Python object of an operator without holding
it, and a rule takes its place in `torch.ops` while a capture runs."""


def _packet(namespace: str, operator: str) -> Any:
    """The operator as PyTorch knows it, or None."""
    owner, key = getattr(torch.ops, namespace), (namespace, operator)
    held = vars(owner).get(operator)
    if held is not None and not isinstance(held, RuledOperator):
        return held
    if key not in _packets:
        vars(owner).pop(operator, None)
        try:
            _packets[key] = getattr(owner, operator)
        except AttributeError:
            return None
        finally:
            if held is not None:
                vars(owner)[operator] = held
    return _packets[key]


class RuledOperator:
    """`torch.ops.namespace.operator` by its rule; by the real one, should it come and the rule not
    differentiate."""

    def __init__(self, rule: Rule, namespace: str, operator: str) -> None:
        self._rule = rule
        self._names = (namespace, operator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packet = _packet(*self._names)
        if packet is not None and self._rule.of_backward is None:
            return packet(*args, **kwargs)
        made = self._rule(*args, **kwargs)
        if packet is not None and len(packet.overloads()) == 1:
            self._rule.check(getattr(packet, packet.overloads()[0]), args, kwargs, made)
        return made

    def __getattr__(self, name: str) -> Any:
        packet = _packet(*self._names)
        if packet is None or self._rule.of_backward is not None:
            if name.startswith("__"):
                raise AttributeError(name)
            return self
        return getattr(packet, name)


def run_python_of(state: CaptureState, op: CustomOpDef) -> None:
    """Let an operator that is written in Python run instead of its shape rule, which does not show
    what it takes beside its results."""

    def handle(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs, _ = state.without_real(args, kwargs)
        with state.mode, torch.no_grad():
            result = op._init_fn(*args, **kwargs)
        if func._schema.is_mutable:
            forget_written(state, func, args, kwargs)
        return result

    state.rules[op._qualname] = handle


def run_python_of_module(module: ModuleType) -> None:
    """The same of all operators of a module."""
    state = rules_module.running()
    for item in vars(module).values():
        if state is not None and isinstance(item, CustomOpDef):
            run_python_of(state, item)


def _handler(rule: Rule) -> Handler:
    def handle(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs, _ = state.without_real(args, kwargs)
        with state.mode, torch.no_grad():
            result = rule.run(Call(), *args, **kwargs)
        rule.check(func, args, kwargs, result)
        if func._schema.is_mutable:
            forget_written(state, func, args, kwargs)
        return result

    return handle


_libraries: dict[str, torch.library.Library] = {}
"""Libraries by namespace; an operator lives as long as the library that defined it."""


class _Shapes(Call):
    """A call of which only the outputs' shapes are wanted: by a compiler, of symbols perhaps."""

    def workspace(self, nbytes: Any, low: Any = None, high: Any = None) -> torch.Tensor:
        """Nothing that anybody sees."""
        return torch.empty(nbytes, dtype=torch.uint8)


def operator_of(rule: Rule, schema: str) -> Any:
    """The operator `rule.name`, defined with `schema` unless its package is here; a capture gives
    what the rule gives.

    For stand-ins whose packages register such operators: a compiler traces the stand-in's Python
    and takes the operator as it is, as it does with the real package.
    """
    namespace, _, name = rule.name.partition("::")
    packet = _packet(namespace, name)
    if packet is None:
        library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        library.define(name + schema)

        def shapes(*args: Any, **kwargs: Any) -> Any:
            return rule.function(_Shapes(), *args, **kwargs)

        torch.library.register_fake(f"{namespace}::{name}", shapes, lib=library)
        packet = _packet(namespace, name)
    return packet.default
