"""The dispatch mode under which a step runs while it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.runtime.compiled.kernel_settings import different_setting, kernel_settings
from memplan.runtime.compiled.lifting import Places
from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.nested import plain
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.op_limits import (
    ITEM,
    PACK,
    check_supported,
    check_values,
    current_stream,
    value_of,
)
from memplan.runtime.compiled.recording.numbers import Numbers
from memplan.runtime.compiled.recording.operators import Call, Operators
from memplan.runtime.compiled.recording.random_numbers import RandomNumbers
from memplan.runtime.compiled.recording.step_graph import StepGraph
from memplan.runtime.compiled.recording.tensors import Tensors
from memplan.runtime.compiled.scalars import Scalar, Symbolic, scalar_of, symbolic
from memplan.runtime.tape.replayable import traits_of

aten = torch.ops.aten
LIFT = (aten.lift_fresh.default, aten.lift.default)


class Recorder(TorchDispatchMode):
    """Give it as a mode to one step; `refusal` tells why no graph came out, if none did."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: NotCapturable | None = None
        self.given: dict[str, Scalar] = {}
        """Numbers that a call takes as plain floats only, by the name of the argument."""
        self.graph = StepGraph()
        self.tensors = Tensors(self.graph, places)
        self.numbers = Numbers(self.graph, self.tensors.known, self.refuse)
        self.random = RandomNumbers(self.graph, self.tensors, places.generators)
        self.operators = Operators(self.graph, self.tensors)
        self._stream = current_stream()
        self._settings = kernel_settings()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            watched = func.namespace != "profiler"
            note = self.guarded(self._prepare, func, args, kwargs) if watched else None
            # The op runs once, whatever becomes of its recording.
            result = value_of(args[0]) if func is ITEM else func(*plain(args), **plain(kwargs))
            noted = None if note is None else self.guarded(note, result)
            return result if noted is None else noted

    def guarded(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """A part of recording, None once a step is refused. What it raises ends the recording and
        not the step."""
        if self.refusal is not None:
            return None
        try:
            return part(*arguments)
        except NotCapturable as refusal:
            self.refuse(refusal)
        except Exception as fault:
            self.refuse(
                NotCapturable(f"a fault of memplan: {fault!r}", refused_at(), "please report it")
            )
        return None

    def refuse(self, refusal: NotCapturable) -> None:
        """The first reason counts."""
        if self.refusal is None:
            self.refusal = refusal

    def _prepare(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], Any]:
        """What must be known of an op before it runs. Gives what records its result, and returns
        what takes the result's place, if anything does."""
        if func in LIFT:
            return partial(self.tensors.constant, args[0])
        if current_stream() != self._stream:
            raise NotCapturable("an operator on another CUDA stream", refused_at())
        if setting := different_setting(self._settings, kernel_settings()):
            raise NotCapturable(
                f"{setting} is set for a part of the step", refused_at(), "set it outside the step"
            )
        traits = traits_of(func)
        given, self.given = self.given, {}
        mapped = self._mapped(args)
        mapped_kwargs = self._mapped(kwargs)
        check_supported(func)
        deciding = mapped[1:2] if func is PACK else (mapped, mapped_kwargs)
        if not self.tensors.known.is_fixed(deciding):
            check_values(func, args)
        if func is ITEM:
            return partial(self.numbers.item, mapped)
        names = [argument.name for argument in func._schema.arguments]
        for name, scalar in given.items():
            if name in mapped_kwargs:
                mapped_kwargs[name] = scalar.node
            elif name in names and names.index(name) < len(mapped):
                mapped[names.index(name)] = scalar.node
        chains = self.random.chains(func, traits, args, kwargs)
        call = Call(func, traits, args, kwargs, mapped, mapped_kwargs, chains)
        return partial(self._ran, call)

    def _ran(self, call: Call, result: Any) -> None:
        self.random.states.drawn(call.chains)
        self.operators.add(call, result)

    def _mapped(self, value: Any) -> Any:
        """Arguments with nodes in place of tensors, numbers that were computed and generators."""
        if isinstance(value, torch.Tensor):
            scalar = scalar_of(value)
            return self.tensors.node_of(value) if scalar is None else self._mapped(symbolic(scalar))
        if isinstance(value, Symbolic):
            scalar = scalar_of(value)
            if scalar is None:
                raise NotCapturable("a size that is not known yet", refused_at())
            scalar.check()
            return scalar.value if scalar.node is None else scalar.node
        if isinstance(value, (list, tuple)):
            return [self._mapped(item) for item in value]
        if isinstance(value, dict):
            return {key: self._mapped(item) for key, item in value.items()}
        if isinstance(value, torch.Generator):
            return self.random.node_of(value)
        if value is None or isinstance(value, _ARGUMENTS):
            return value
        raise NotCapturable(f"an operator is given a {type(value).__name__}", refused_at())


_ARGUMENTS = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
