"""Puts a plan's part `grad_views` into effect: gradients of DistributedDataParallel are views of
its buckets, as with `gradient_as_bucket_view=True`, and not copies of what is in them.

Li et al. (2020), "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
describe buckets. Without views each backward pass makes new gradients, which a job may keep; with
views the next one writes over them. So it is looked, before each pass, whether anything has kept
them, or has put other memory in their place, and then the job ends before it can use a wrong value.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.job_observer import JobObserver
from memplan.types.errors import GradViewsError

_OPTION = "gradient_as_bucket_view"


class _View(NamedTuple):
    """A gradient after a backward pass."""

    parameter: nn.Parameter
    tensor: weakref.ref[Tensor]
    storage: int
    references: int
    """To the tensor and to its storage, which is the bucket's."""


class _Followed(NamedTuple):
    """A module's parameters, and their gradients after the last backward pass."""

    parameters: list[nn.Parameter]
    views: list[_View]


class GradViews:
    """A context manager for every DistributedDataParallel that is made while it is entered."""

    def __init__(self, on_note: Callable[[str], None] = lambda text: None) -> None:
        """`on_note` is told, in a sentence, why gradients stay copies."""
        self._on_note = on_note
        self._followed: weakref.WeakKeyDictionary[nn.Module, _Followed] = (
            weakref.WeakKeyDictionary()
        )
        self._patches = Patches()
        self._observer = JobObserver()

    def __enter__(self) -> GradViews:
        real: Any = DistributedDataParallel.__init__
        signature = inspect.signature(real)

        @functools.wraps(real)
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(module, *args, **kwargs)
            already = given.arguments.get(_OPTION, False)
            reason = "they are views already" if already else _why_not(given.arguments)
            given.arguments[_OPTION] = already or not reason
            real(*given.args, **given.kwargs)
            setattr(module, _OPTION, already)  # of its copies and pickles, which nothing follows
            if reason:
                self._on_note(f"gradients are not made views of DDP's buckets: {reason}")
            else:
                self._followed[module] = _Followed(list(module.parameters()), [])

        self._patches.set(DistributedDataParallel, "__init__", init)
        self._observer.on_backward(self._around_backward)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._observer.close()
        self._patches.undo()

    @contextmanager
    def _around_backward(self, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        if torch._C._current_graph_task_id() != -1:  # within another one
            yield
            return
        for one in self._followed.values():
            _check(one)
            one.views.clear()
        try:
            with _unread(id(each) for one in self._followed.values() for each in one.parameters):
                yield
        finally:
            for one in self._followed.values():
                one.views.extend(_view(each) for each in one.parameters if each.grad is not None)


@contextmanager
def _unread(parameters: Iterable[int]) -> Iterator[None]:
    """Within it GradViewsError is raised where Python code, such as a hook, reads the gradient of
    one of the parameters: it may be divided already, and summed."""
    known = frozenset(parameters)
    real: Any = Tensor.grad

    def grad(tensor: Tensor) -> Tensor | None:
        found: Tensor | None = real.__get__(tensor)
        if found is not None and id(tensor) in known:
            raise _error("a gradient is read in the backward pass")
        return found

    if not known:
        yield
        return
    patches = Patches()
    patches.set(nn.Parameter, "grad", property(grad, real.__set__, real.__delete__), new=True)
    try:
        yield
    finally:
        patches.undo()


def _why_not(given: dict[str, Any]) -> str:
    """Why numbers could differ: a gradient that no rank adds to is averaged only where it is a
    view; DDP's own mixed precision casts gradients after they are summed; and sums over ranks are
    divided by their number before or after they are rounded, which is the same for powers of two.
    """
    if given.get("find_unused_parameters") or given.get("static_graph"):
        return "some parameters may be unused in a pass"
    if given.get("mixed_precision") is not None:
        return "DDP is given a mixed precision"
    group = given.get("process_group")
    mesh = given.get("device_mesh")
    ranks = torch.distributed.get_world_size(group if mesh is None else mesh.get_group())
    return "" if ranks & (ranks - 1) == 0 else f"{ranks} ranks are no power of two"


def _view(parameter: nn.Parameter) -> _View:
    assert parameter.grad is not None
    tensor = weakref.ref(parameter.grad)
    return _View(parameter, tensor, *_memory(tensor))


def _memory(of: weakref.ref[Tensor]) -> tuple[int, int]:
    """The storage, and the number of references: one more for each name that a job has for the
    tensor, or for another tensor with this memory."""
    tensor: Any = of()
    storage = tensor.untyped_storage()._cdata
    references = sys.getrefcount(tensor) + tensor._use_count()
    return storage, references + torch._C._storage_Use_Count(storage)


def _check(followed: _Followed) -> None:
    """Raises GradViewsError where the pass that begins would do something else than without
    views."""
    for parameter in followed.parameters:
        if parameter._post_accumulate_grad_hooks:
            raise _error("a hook waits for gradients, which are not yet those of all ranks there")
    for view in followed.views:
        if view.tensor() is None:  # it was in a bucket that DDP has replaced
            continue
        storage, references = _memory(view.tensor)
        if storage != view.storage:
            raise _error("a gradient got other memory by `.data = …`")
        released = view.parameter.grad is not view.tensor()
        # Fewer are left where DDP has replaced the bucket, and the job keeps what was in it.
        if references + released != view.references:
            raise _error("gradients of one backward pass are kept over the next one")


def _error(reason: str) -> GradViewsError:
    return GradViewsError(
        f"{reason}, and by the plan gradients are views of DistributedDataParallel's buckets: "
        "going on could change the job's numbers",
        'run without the plan, or delete its part "grad_views"',
    )
