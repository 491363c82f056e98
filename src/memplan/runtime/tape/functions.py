"""Tells recordings of what PyTorch does out of a dispatch mode's sight: calls of functions that
have a backward of their own, and transforms that refuse saved-tensor hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import _SingleLevelFunction

if TYPE_CHECKING:
    from memplan.runtime.tape.recording import Recording

_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


class _Watchers(threading.local):
    def __init__(self) -> None:
        self.innermost_last: list[Recording] = []


_watchers = _Watchers()
_lock = threading.Lock()
_users = 0
_graph: Any = torch.autograd.graph
_refuse_hooks = _graph.disable_saved_tensors_hooks
_function: Any = _SingleLevelFunction
"""The function in which all calls of `Function.apply` end, also of methods bound earlier."""


@contextmanager
def watched_by(watcher: Recording) -> Iterator[None]:
    """Inside, on this thread, `watcher` is told. Nothing stays patched when nobody watches."""
    _use(1)
    _watchers.innermost_last.append(watcher)
    try:
        yield
    finally:
        _watchers.innermost_last.remove(watcher)
        _use(-1)


def top_hooks() -> Any:
    """The saved-tensor hooks in force; None where there are none."""
    return _top_hooks(True)


def hooks_are_refused() -> bool:
    """Whether nobody may set saved-tensor hooks, as inside `torch.func.grad` and its kin."""
    return _refusal() is not None


def _use(change: int) -> None:
    global _users
    with _lock:
        _users += change
        if change > 0 and _users == 1:
            _function.apply = classmethod(_apply)
            _graph.disable_saved_tensors_hooks = _without_hooks
        elif _users == 0:
            del _function.apply
            _graph.disable_saved_tensors_hooks = _refuse_hooks


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    def call() -> Any:
        return super(_function, cls).apply(*args, **kwargs)

    for watcher in _watchers.innermost_last:
        call = _told(watcher, call, args)
    return call()


def _told(watcher: Recording, call: Callable[[], Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: watcher.call_function(call, args)


@contextmanager
def _without_hooks(message: str) -> Iterator[None]:
    """`torch.func.grad` and its kin raise while anybody's hooks are set: ours step aside."""
    ours = {watcher.hooks for watcher in _watchers.innermost_last}
    aside = []
    while (top := top_hooks()) is not None and top in ours:
        aside.append(top)
        _pop_hooks()
    try:
        with _refuse_hooks(message):
            yield
    finally:
        for hooks in reversed(aside):
            _push_hooks(*hooks)
