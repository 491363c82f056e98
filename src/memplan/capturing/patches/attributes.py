"""Attributes replaced for a while, and put back in reverse order."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from memplan._native import modules_with
from memplan.capturing.patches.internals import MissingNameError, is_missing, torch_name

_ABSENT = object()

as_compilers_see: Callable[[], AbstractContextManager[None]] = nullcontext
"""Inside, PyTorch is as its compiler saw it: in a capture, without the capture's patches."""


class Patches:
    """A stack of replaced attributes and mapping items."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self.gathered: dict[int, Any] | None = None
        """What takes the place of objects, by their ids, wherever modules name these: not done
        yet. None where it is done at once."""

    def set(self, owner: Any, name: str, value: Any, *, new: bool = False) -> Any:
        """Replace `owner.name`; returns what stood there, or None.

        Raises MissingNameError for a private name of PyTorch's that is not there, unless it is
        `new`: nobody would call what takes its place.
        """
        if not new and is_missing(owner, name):
            raise MissingNameError(f"{torch_name(owner)}.{name}")
        before = vars(owner).get(name, _ABSENT)
        self._undo.append((owner, name, before))
        _put(owner, name, value)
        return None if before is _ABSENT else before

    def originals(self, *, added: bool = False) -> list[tuple[Any, str, Any]]:
        """What was replaced and stood there at first: owner, name, value. `added`: attributes that
        were not there, too."""
        found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, before in self._undo:
            found.setdefault((id(owner), name), (owner, name, before))
        return [item for item in found.values() if added or item[2] is not _ABSENT]

    @contextmanager
    def suspended(
        self, which: Callable[[Any, str, Any], bool], *, added: bool = False
    ) -> Iterator[None]:
        """Put back for a while what stood there at first, where `which(owner, name, value)`;
        `added`: take out attributes that were not there, as `which(owner, name, None)` says."""
        taken_out = Patches()
        for owner, name, before in self.originals(added=added):
            if which(owner, name, None if before is _ABSENT else before):
                taken_out.set(owner, name, before, new=True)
        try:
            yield
        finally:
            taken_out.undo()

    def reach_into_the_job(self) -> None:
        """Replace also what `from … import` took of the modules that were patched, in the job's
        modules."""
        stand_ins = {id(real): patched for real, patched in self._of_modules()}
        for module, name, value in named_by_modules(stand_ins, of_the_job):
            self.set(module, name, value, new=True)

    def forget_in_the_job(self, before: Container[str]) -> None:
        """Put back what `from … import` took meanwhile, in the job's modules that were not there
        `before`."""
        originals = {id(patched): real for real, patched in self._of_modules()}
        which = lambda name, module: name not in before and of_the_job(name, module)  # noqa: E731
        for module, name, value in named_by_modules(originals, which):
            setattr(module, name, value)

    def _of_modules(self) -> list[tuple[Any, Any]]:
        """Functions and classes of modules: what stood there, and what stands there now."""
        return [
            (before, vars(owner)[name])
            for owner, name, before in self.originals()
            if isinstance(owner, types.ModuleType) and callable(before) and name in vars(owner)
        ]

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            _put(*self._undo.pop())


def of_the_job(name: str, module: object) -> bool:
    """Whether an imported module is a plain one, neither PyTorch's nor ours."""
    return type(module) is types.ModuleType and name.partition(".")[0] not in ("torch", "memplan")


def named_by_modules(
    others: dict[int, Any], which: Callable[[str, object], bool]
) -> Iterator[tuple[types.ModuleType, str, Any]]:
    """Attributes of the imported modules of which `which(name, module)`, where `others` knows the
    value by its id: the module, the attribute's name, and what `others` has."""
    imported = [module for name, module in list(sys.modules.items()) if which(name, module)]
    for number in modules_with(imported, others):
        module = imported[number]
        for name, value in list(vars(module).items()):
            if id(value) in others:
                yield module, name, others[id(value)]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method and does not keep its object alive: PyTorch never lets go of the kernels that
    were registered with it, also when their library is gone."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        assert alive is not None
        return alive(*args, **kwargs)

    return call


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
