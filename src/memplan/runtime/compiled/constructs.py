"""What a step does out of the dispatcher's sight: reading tensors into Python, schedulers, random
state, hyperparameters."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from json import JSONEncoder
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from memplan.runtime.compiled.gates import watch_scaler
from memplan.runtime.compiled.lines import is_users_file, refused_at
from memplan.runtime.compiled.look_alikes import as_given, escaped, of_numbers
from memplan.runtime.compiled.nested import plain
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
_OF_MATH = (
    "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "pow", "sin", "cos", "tan", "sinh",
    "cosh", "tanh", "degrees", "radians", "copysign", "fabs",
)  # fmt: skip
"""Functions of `math` that a graph can hold: the perplexity of a loss, a schedule by a cosine."""


class Constructs(TorchFunctionMode):
    """While entered, what a graph would lose is refused or kept as an effect."""

    def __init__(
        self, recorder: Recorder, hyperparameters: Hyperparameters, compares_types: str = ""
    ) -> None:
        """`compares_types`: where the user's code tells numbers apart by `type(x)`. It is given
        plain ones."""
        super().__init__()
        self._compares_types = compares_types
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
                    NotCapturable(
                        f"{construct}: a tensor read from Python",
                        refused_at(),
                        "return the tensor, and read it outside the step",
                    )
                )
            elif func in _FROM_DATA and args and not _is_python(args[0]):
                self.recorder.refuse(
                    NotCapturable(
                        f"a tensor made from a {type(args[0]).__name__}",
                        refused_at(),
                        "pass it to the step as an argument",
                    )
                )
            elif func in _FLOATS_ONLY:
                kwargs = self._floats(kwargs)
        if func in _FROM_DATA and args and (places := _places_of_numbers(args[0])):
            return _tensor_of(func, args, kwargs, places)
        result = func(*args, **kwargs)
        if isinstance(result, Symbolic) and self._compares_types:
            result = self._plain(result)
        return as_given(result)

    def _plain(self, number: Any) -> Any:
        """A plain number for code of the user, though no graph can follow it."""
        caller = sys._getframe(2)
        while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:
            caller = caller.f_back
        if (scalar := scalar_of(number)) is None or not is_users_file(caller.f_code.co_filename):
            return number
        self.recorder.refuse(
            NotCapturable(
                "a number is read from a tensor where the step tells numbers by type(x)",
                self._compares_types,
                "isinstance(x, float)",
            )
        )
        return scalar.value

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
        for name in ("encode", "iterencode"):
            self._patches.replace(JSONEncoder, name, _encoding(vars(JSONEncoder)[name]))
        for name in _OF_MATH:
            self._patches.replace(math, name, of_numbers(vars(math)[name]))
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


def _places_of_numbers(data: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Any]]:
    """Symbolic numbers among nested ones, and the index of each in a tensor made from them."""
    if isinstance(data, (list, tuple)):
        return [
            found
            for place, item in enumerate(data)
            for found in _places_of_numbers(item, (*path, place))
        ]
    return [(path, data)] if isinstance(data, Symbolic) and scalar_of(data) is not None else []


def _tensor_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: list[Any]
) -> torch.Tensor:
    """A tensor made from numbers of which some are another one at each step."""
    kwargs = dict(kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    made: torch.Tensor = func(plain(args[0]), *args[1:], **kwargs)
    with torch.no_grad():
        for path, number in places:
            made[path].fill_(number)
    return made.requires_grad_() if requires_grad else made


def _format(number: torch.SymFloat, spec: str) -> str:
    return format(float(number), spec)


def _encoding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """JSON's encoder is C and knows floats alone."""

    @functools.wraps(plain)
    def encode(encoder: JSONEncoder, value: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(encoder, escaped(value), *args, **kwargs)

    return encode


class Hyperparameters:
    """While entered, floats in the optimizers' groups that schedulers change are symbolic."""

    def __init__(
        self, recorder: Recorder, optimizers: list[Optimizer], constant: bool = False
    ) -> None:
        """`constant`: the program serves for the values that they have."""
        self._constant = constant
        self.recorder = recorder
        self.optimizers = optimizers
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def __enter__(self) -> None:
        if self._constant:
            return
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
            lifted = self._input(Place(path, By.ITEM, group, key), value)
        elif type(value) is tuple and all(type(item) is float for item in value):
            lifted = tuple(
                self._input(Place(f"{path}[{n}]", By.ITEM_OF_ITEM, group, (key, n)), item)
                for n, item in enumerate(value)
            )
        else:
            return
        self._replaced.append((group, key, value, lifted))
        group[key] = lifted

    def _input(self, place: Place, value: float) -> Any:
        return as_given(self.recorder.numbers.input(place, value))

    def mark(self) -> None:
        """A scheduler has changed them: whoever uses one from now on is refused."""

        def late(value: float) -> Any:
            return as_given(self.recorder.numbers.late(value))

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
