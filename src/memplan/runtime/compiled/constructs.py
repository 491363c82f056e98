"""What a step does out of the dispatcher's sight: reading tensors into Python, schedulers, random
state, hyperparameters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from memplan.runtime.compiled.gates import watch_scaler
from memplan.runtime.compiled.lines import user_line
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.patching import Patches
from memplan.runtime.compiled.program import By, Place
from memplan.runtime.compiled.recording import Recorder
from memplan.runtime.compiled.scalars import Symbolic, scalar_of
from memplan.runtime.compiled.schedulers import Schedules
from memplan.runtime.compiled.watch_random import watch_random_state

_ESCAPES = {
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "a conversion to NumPy",
    torch.Tensor.__dlpack__: "an export by DLPack",
    torch.Tensor.data_ptr: "data_ptr()",
    torch.Tensor.untyped_storage: "untyped_storage()",
    torch.Tensor.storage: "storage()",
    torch.Tensor.share_memory_: "share_memory_()",
    torch.Tensor.__deepcopy__: "deepcopy of a tensor",
    torch.Tensor.__reduce_ex__: "pickling a tensor",
}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
_FLOATS_ONLY = {
    getattr(torch, name)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    if hasattr(torch, name)
}
"""They take a learning rate as a Python float and nothing that stands for one."""


class Constructs(TorchFunctionMode):
    """While entered, what a graph would lose is refused or kept as an effect."""

    def __init__(self, recorder: Recorder, hyperparameters: Hyperparameters) -> None:
        super().__init__()
        self.recorder = recorder
        self.schedules = Schedules(recorder.refuse, hyperparameters.restore, hyperparameters.mark)
        self._patches = Patches()
        self._stack = ExitStack()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recorder.refusal is None:
            try:
                construct = _ESCAPES.get(func)
            except TypeError:
                construct = None
            if construct is not None:
                self.recorder.refuse(
                    NotCapturable(f"{construct}: a tensor read from Python", user_line())
                )
            elif func in _FROM_DATA and args and not _is_python(args[0]):
                self.recorder.refuse(
                    NotCapturable(
                        f"a tensor made from a {type(args[0]).__name__}",
                        user_line(),
                        "pass it to the step as an argument",
                    )
                )
            elif func in _FLOATS_ONLY:
                kwargs = self._floats(kwargs)
        return func(*args, **kwargs)

    def _floats(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        plain = {}
        for name, value in kwargs.items():
            scalar = scalar_of(value) if isinstance(value, Symbolic) else None
            if scalar is not None and scalar.node is not None:
                self.recorder.given[name] = scalar
            plain[name] = value if scalar is None else scalar.value
        return plain

    def __enter__(self) -> Constructs:
        super().__enter__()  # type: ignore[no-untyped-call]
        stack = self._stack
        stack.callback(self._patches.undo)
        watch_random_state(self.recorder, self._patches)
        watch_scaler(self.recorder, self._patches)
        self.schedules.watch(self._patches)
        self._patches.replace(torch.SymFloat, "__format__", _format)
        before = register_optimizer_step_pre_hook(self._update_begins)
        after = register_optimizer_step_post_hook(self._update_ends)
        stack.callback(before.remove)
        stack.callback(after.remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.recorder.graph.updating += 1

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.recorder.graph.updating -= 1


def _is_python(data: Any) -> bool:
    """Whether it is made of Python's own numbers, or tensors."""
    if isinstance(data, (list, tuple)):
        return all(map(_is_python, data))
    return type(data) in (bool, int, float, complex) or isinstance(data, (torch.Tensor, *Symbolic))


def _format(number: torch.SymFloat, spec: str) -> str:
    return format(float(number), spec)


class Hyperparameters:
    """While entered, floats in the optimizers' groups that schedulers change are symbolic."""

    def __init__(self, recorder: Recorder, optimizers: list[Optimizer]) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def __enter__(self) -> None:
        several = len(self.optimizers) > 1
        for number, optimizer in enumerate(self.optimizers):
            name = f"optimizer[{number}]" if several else "optimizer"
            for index, group in enumerate(optimizer.param_groups):
                for key in group:
                    if key in _CHANGING:
                        self._lift(f"{name}.param_groups[{index}][{key!r}]", group, key)

    def _lift(self, path: str, group: dict[str, Any], key: str) -> None:
        value = group[key]
        lifted: Any
        if type(value) is float:
            lifted = self.recorder.numbers.input(Place(path, By.ITEM, group, key), value)
        elif type(value) is tuple and all(type(item) is float for item in value):
            lifted = tuple(
                self.recorder.numbers.input(
                    Place(f"{path}[{n}]", By.ITEM_OF_ITEM, group, (key, n)), item
                )
                for n, item in enumerate(value)
            )
        else:
            return
        self._replaced.append((group, key, value, lifted))
        group[key] = lifted

    def mark(self) -> None:
        """A scheduler has changed them: whoever uses one from now on is refused."""
        late = self.recorder.numbers.late
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for key in _CHANGING & group.keys():
                value = group[key]
                marked: Any
                if type(value) is float:
                    marked = late(value)
                elif type(value) is tuple and all(type(item) is float for item in value):
                    marked = tuple(map(late, value))
                else:
                    continue
                self._replaced.append((group, key, value, marked))
                group[key] = marked

    def __exit__(self, *exception: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts the numbers back."""
        for group, key, value, lifted in self._replaced:
            if group.get(key) is lifted:
                group[key] = value
            else:
                self.recorder.refuse(
                    NotCapturable(f"the step sets {key} of the optimizer", "", "use a scheduler")
                )
        self._replaced.clear()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, (tuple, *Symbolic)):
                    group[key] = _plain(value)


_CHANGING = {"lr", "momentum", "betas"}
"""Hyperparameters that schedulers change."""


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    scalar = scalar_of(value) if isinstance(value, Symbolic) else None
    return value if scalar is None else scalar.value
