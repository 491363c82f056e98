"""Lets loops of a job's own code end, as data loaders do that run dry.

Nothing can end a loop over a `range` from outside, or one with `while`. So while a capture runs,
files of the job are compiled with `for x in turns(xs):` in place of `for x in xs:`, and with
`while condition and turn.comes():` in place of `while condition:`, where the loop's body may train.

A loop that reads a loader by what has no end (`while True: yield from loader`, `itertools.cycle`)
trains on once the loader ran dry, and ends in this way, too.

Loops inside installed packages are not compiled anew. A statement of the job that calls one, as in
`agent.learn(10_000)`, is put into `with training():`, and is left by an exception once enough of it
was seen: the job goes on after it. Where the call's result is used, as in `history = fit(…)` or
`return fit(…)`, that is something `Unseen`.
"""

from __future__ import annotations

import ast
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.training.periods import REMAINDER, remainder, with_remainders
from memplan.capturing.training.syntax import expression, statement
from memplan.types.installed import is_installed

_TURNS = "__memplan_turns__"
"""The name of `turns` in the job's modules. Functions that the job pickles refer to it there."""
_TRAINING = "__memplan_training__"
"""The name of `training` there."""
_UNSEEN = "__memplan_unseen__"
"""The name of `unseen` there."""
_TRAINS = ("backward", "step")
_NAMES_OF_TRAINING = ("train", "fit", "step", "epoch", "update", "optim", "learn")
"""Parts of names of functions from other files that may train. A loop that is missed is one in
which the capture ends, as it would without this module."""
_LIKE_BEFORE = 2
"""Turns of a loop around a training in which that needs no more than before, and is run for a step.
After one more the loop ends, too, which is such a turn of the loop around it."""
_STEPS_OF_A_TRAINING = 2
"""A call in which so many steps end is a training; one with fewer is part of a loop's turn."""
_PASSES_LEFT = 16
"""Backward passes, beyond those of a step, that may follow in a turn that is to be the last."""

_alive: list[weakref.ref[_Turns]] = []
_now = itertools.count().__next__
"""A clock, which tells whether a loop's turn began before a loader was opened."""


class _Turns:
    """The items of a loop, until it is to end. Alive as long as the loop, which alone holds it."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.began = _now()
        """When this turn did."""
        self.reads_on = False
        """Whether a turn read from a loader that one before had opened."""
        self.next_item = iter(items).__next__
        self.ends = False
        self.like_before = 0
        self.frame = id(sys._getframe(2))
        """Of the job's function, which no other has as long as the loop lives."""
        _alive.append(weakref.ref(self, _alive.remove))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.comes():
            raise StopIteration
        return self.next_item()

    def comes(self) -> bool:
        """Whether a `while` loop may go on."""
        self.began = _now()
        return not self.ends


class _Left(BaseException):
    """Ends a call that trains."""


class _Training(_Turns):
    """A statement that calls a function of another file which may train."""

    def __init__(self) -> None:
        super().__init__()
        caller = sys._getframe(2)
        self.frame = id(caller)
        self.place = caller.f_code, caller.f_lineno
        self.first_step: int | None = None
        """The number of the first step in it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        return self.ends and isinstance(error, _Left)


def turns(items: Iterable[Any] | None) -> Iterable[Any] | None:
    """The items of a `for` loop; None for a `while` loop. PyTorch's compiler traces this function,
    and its graphs have nothing of it."""
    if torch.compiler.is_compiling():
        return items
    return _Turns() if items is None else _Turns(items)


def training() -> AbstractContextManager[None]:
    """Around a statement that may train."""
    return nullcontext() if torch.compiler.is_compiling() else _Training()


class Unseen:
    """The result of a call that was left: a number, text or list of nothing, to look at and to
    compute with. It cannot be called, and is no tensor or model: what needs one ends the job there.
    """

    def __init__(self, parts: int = 0) -> None:
        """`parts`: into how many the job takes it apart."""
        self._parts = parts

    def __iter__(self) -> Iterator[Unseen]:
        return (Unseen() for _ in range(self._parts))

    def __getattr__(self, name: str) -> Unseen:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unseen()

    def _another(self, *_others: object) -> Unseen:
        return Unseen()

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _another
    __truediv__ = __rtruediv__ = __neg__ = __round__ = _another

    def _no(self, _other: object) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _no

    def __float__(self) -> float:
        return 1.0

    def __len__(self) -> int:
        return self._parts

    def __format__(self, _spec: str) -> str:
        return "?"


def unseen(parts: int) -> Unseen | None:
    """What the result of a call is until it returns."""
    return None if torch.compiler.is_compiling() else Unseen(parts)


class PlainLoops:
    """The loops of the job's code, of which those that train are ended from within."""

    def __init__(self) -> None:
        self._earlier = list(_alive)
        """Loops around the capture, of files that an earlier one compiled: they are not its own."""
        self._ended: weakref.ref[_Turns] | None = None
        """The loop that was told last to end."""
        self._passes_left = 0
        self._leaves = False
        """Whether a step ended since."""
        self._step = self._passes = self._most_passes = 0
        """The step that runs; its backward passes, and those of the step with most."""
        self._around: list[weakref.ref[_Turns]] = []
        """The loops around the last backward pass, or the step that ended last."""
        self._opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """When each loader's iterator was created."""
        self._read_on: list[weakref.ref[_Turns]] = []
        self._trainings: set[object] = set()
        """Places of calls that were left."""
        self.skipped = False
        """Whether a loop around a training was told to end, with what it would train yet."""

    def install(self, patches: Patches) -> None:
        """Let the job's files be compiled with loops that can be ended, until `patches.undo()`."""
        real_get: Any = SourceFileLoader.get_code
        real_compile: Any = SourceFileLoader.source_to_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            if is_installed(path):  # perhaps from bytecode that is kept
                return real_get(loader, fullname)  # type: ignore[no-any-return]
            return loader.source_to_code(loader.get_data(path), path)

        def source_to_code(
            loader: SourceFileLoader, data: Any, path: str, *args: Any, **kwargs: Any
        ) -> CodeType:
            if isinstance(data, bytes) and not is_installed(path):
                with suppress(RecursionError):  # it nests deeper than Python here can walk
                    tree = with_turns(ast.parse(data, path), path)
                    return real_compile(loader, tree, path, *args, **kwargs)  # type: ignore[no-any-return]
            return real_compile(loader, data, path, *args, **kwargs)  # type: ignore[no-any-return]

        patches.set(SourceFileLoader, "get_code", get_code)
        patches.set(SourceFileLoader, "source_to_code", source_to_code)

    def end(self) -> bool:
        """End the innermost loop around this step after its turn. Returns whether there is one."""
        self._look()
        return bool(self._end())

    def ran_dry(self) -> None:
        """To be called when loaders run dry: the loops whose turns read on from one should end."""
        self._read_on = [ref for ref in _alive if (one := ref()) is not None and one.reads_on]

    def end_reading(self) -> bool:
        """End the innermost of these around the last backward pass: its training went on."""
        return bool(self._end(lambda one: weakref.ref(one) in self._read_on))

    def end_endless(self) -> bool:
        """End the innermost loop around the last backward pass that goes on."""
        return bool(self._end())

    def opened(self, reading: Any) -> None:
        """To be called with the new iterator of a loader."""
        self._opened[reading] = _now()

    def gave(self, reading: Any) -> None:
        """To be called when the iterator of a loader gives a batch."""
        opened = self._opened.get(reading, sys.maxsize)
        for one in filter(None, (ref() for ref in _alive)):
            one.reads_on |= one.began > opened

    def _look(self) -> None:
        """Note the loops around what this thread runs, and none of generators that wait."""
        frame: FrameType | None = sys._getframe(1)
        running = set()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        mine = [ref for ref in _alive if ref not in self._earlier]
        self._around = [ref for ref in mine if (one := ref()) is not None and one.frame in running]

    def backward(self, step: int) -> None:
        """To be called where a backward pass begins, in step `step`."""
        self._look()
        self._passes = self._passes + 1 if step == self._step else 1
        self._most_passes = max(self._most_passes, self._passes)
        self._step = step
        for one in filter(None, (ref() for ref in _alive)):
            if isinstance(one, _Training) and one.first_step is None:
                one.first_step = step

    def stepped(self) -> None:
        """To be called after a step, once a loop was told to end."""
        self._leaves = True

    def leave(self) -> None:
        """To be called where the next step begins: end the call of another file's training here, if
        that is what was told to end."""
        ended = self._ended() if self._ended is not None and self._leaves else None
        if isinstance(ended, _Training):
            self._trainings.add(ended.place)
            raise _Left

    @property
    def passed(self) -> bool:
        """Whether the script has left the loop that was to end."""
        return self._ended is not None and self._ended() is None

    @property
    def used(self) -> bool:
        """Whether a loop was told to end."""
        return self._ended is not None

    @property
    def left_a_call(self) -> bool:
        """Whether a call of another file's training was left before its end."""
        return bool(self._trainings)

    def go_on(self) -> None:
        """Another training is followed, which may read a loader: loops that were told to end and
        have not yet go on."""
        self._ended, self.skipped = None, False
        for one in filter(None, (ref() for ref in _alive)):
            one.ends, one.like_before = False, 0

    def trains_again(self) -> bool:
        """To be called where a backward pass begins after `end`. Returns whether to go on: the turn
        is not over yet, or what trains needs no more than what trained before and its loop was told
        to end."""
        if not self.passed:
            self._passes_left -= 1
            return self._passes_left >= 0
        around = self._end()
        for one in around[1:]:
            if isinstance(one, _Training):
                continue
            one.like_before += 1
            if one.like_before <= _LIKE_BEFORE:
                break
            one.ends = self.skipped = True
        return bool(around)

    def _end(self, which: Callable[[_Turns], bool] = lambda _: True) -> list[_Turns]:
        """End the innermost loop of this kind. Returns it, with those around it that go on."""
        begun = (ref() for ref in reversed(self._around))
        mine = [one for one in begun if one is not None and not one.ends]
        mine = [one for one in mine if self._trains(one) and which(one)]
        if mine:
            mine[0].ends = True
            self._ended = weakref.ref(mine[0])
            self._passes_left, self._leaves = _PASSES_LEFT + self._most_passes, False
        return mine

    def _trains(self, one: _Turns) -> bool:
        """Whether it is a loop, or a call with several steps."""
        if not isinstance(one, _Training):
            return True
        first = self._step if one.first_step is None else one.first_step
        return one.place in self._trainings or self._step - first >= _STEPS_OF_A_TRAINING


def with_turns(tree: ast.Module, path: str) -> ast.Module:
    """A module in which loops that may train ask before each turn whether it is to come, and
    conditions on a remainder whether they are to hold."""
    divides = with_remainders(tree, path)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    called = [(node.name, _called(node)) for node in functions]
    own, trains = {name for name, _ in called}, set(_TRAINS)
    while found := {name for name, calls in called if calls & trains} - trains:
        trains |= found

    def may_train(name: str) -> bool:
        of_others = any(part in name.lower() for part in _NAMES_OF_TRAINING)
        return name in trains or (of_others and name not in own)

    def of_another_file(call: ast.Call) -> bool:
        name = _name(call)
        return name not in own and name not in _TRAINS and may_train(name)

    def with_result(node: Any, targets: list[ast.expr]) -> ast.AST | list[ast.AST]:
        """A statement that uses the result of such a call. The name for it holds it no longer."""
        if not isinstance(node.value, ast.Call) or not of_another_file(node.value):
            return node  # type: ignore[no-any-return]
        parts = max((len(one.elts) for one in targets if isinstance(one, ast.Tuple)), default=0)
        name = f"{_UNSEEN[:-2]}{next(numbers)}__"  # which no class takes for a field
        around = statement(f"with {_TRAINING}(): {name} = 0", node)
        around.body[0].value, node.value = node.value, expression(name, node.value)
        changed.append(node)
        return [
            statement(f"{name} = {_UNSEEN}({parts})", node),
            around,
            node,
            statement(f"del {name}", node),
        ]

    class WithTurns(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return node if isinstance(node, ast.expr) else super().visit(node)  # no statements

        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            # Numba compiles bytecode, and knows no function of ours.
            jitted = any("jit" in ast.unparse(one) for one in node.decorator_list)
            return node if jitted else self.generic_visit(node)

        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            self.generic_visit(node)
            if not isinstance(node.value, ast.Call) or not of_another_file(node.value):
                return node
            around = statement(f"with {_TRAINING}(): 0", node)
            around.body = [node]
            changed.append(node)
            return around  # type: ignore[no-any-return]

        def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
            return with_result(node, node.targets)

        def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | list[ast.AST]:
            return with_result(node, [node.target])

        def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.AST]:
            return with_result(node, [])

        def visit_For(self, node: ast.For) -> ast.AST:
            self.generic_visit(node)
            if any(map(may_train, _called(*node.body))):
                asks = expression(f"{_TURNS}(0)", node.iter)
                asks.args[0], node.iter = node.iter, asks
                changed.append(node)
            return node

        def visit_While(self, node: ast.While) -> ast.AST | list[ast.AST]:
            self.generic_visit(node)
            if not any(map(may_train, _called(*node.body))):
                return node
            name = f"{_TURNS}{next(numbers)}"
            asks = expression(f"0 and ({name} is None or {name}.comes())", node.test)
            asks.values[0], node.test = node.test, asks
            changed.append(node)
            return [
                statement(f"{name} = {_TURNS}(None)", node),
                node,
                statement(f"{name} = None", node),
            ]

    numbers, changed = itertools.count(1), list[ast.AST]()
    WithTurns().visit(tree)
    if changed or divides:
        place = next((n for n, one in enumerate(tree.body) if not _comes_first(one)), 0)
        named = [(turns, _TURNS), (training, _TRAINING), (unseen, _UNSEEN), (remainder, REMAINDER)]
        names = ", ".join(f"{one.__name__} as {name}" for one, name in named)
        line = f"from {__name__} import {names}"
        tree.body.insert(place, statement(line, tree.body[place]))
    return tree


def _comes_first(node: ast.stmt) -> bool:
    """Whether it is a module's docstring, or imports from `__future__`."""
    of_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
    return of_future or isinstance(node, ast.Expr)


def _called(*nodes: ast.AST) -> set[str]:
    """Names of functions and methods that are called."""
    calls = (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call))
    return {_name(one) for one in calls} - {""}


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))
