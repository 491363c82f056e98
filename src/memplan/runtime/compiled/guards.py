"""Whether a captured step is still the step that would run now.

Each check names what differs, for the log line of a recompilation.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec

from memplan.runtime.compiled.foreseen import ForeseenValues
from memplan.runtime.compiled.kernel_settings import KERNEL_SETTINGS
from memplan.runtime.compiled.program import Geometry, Input, Kind, Pin, Place, StepProgram
from memplan.runtime.compiled.python_items import same
from memplan.runtime.compiled.python_state import PythonState
from memplan.runtime.tape.functions import top_hooks

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_PLACED_BY_NUMBER = frozenset({"as_strided", "as_strided_", "as_strided_copy", "set_"})
"""Ops that place a view by its offset in the storage."""


def _kind_of_mode(mode: object) -> str:
    return type(mode).__qualname__


_SETTINGS: list[tuple[str, Callable[[], Any]]] = [
    ("grad mode", torch.is_grad_enabled),
    ("inference mode", torch.is_inference_mode_enabled),
    ("autocast on the CPU", lambda: torch.is_autocast_enabled("cpu")),
    ("autocast on CUDA", lambda: torch.is_autocast_enabled("cuda")),
    ("autocast's type on the CPU", lambda: torch.get_autocast_dtype("cpu")),
    ("autocast's type on CUDA", lambda: torch.get_autocast_dtype("cuda")),
    *KERNEL_SETTINGS,
    ("flash attention", torch._C._get_flash_sdp_enabled),
    ("memory-efficient attention", torch._C._get_mem_efficient_sdp_enabled),
    ("attention by plain math", torch._C._get_math_sdp_enabled),
    ("attention by cuDNN", torch._C._get_cudnn_sdp_enabled),
    ("anomaly detection", torch.is_anomaly_enabled),
    ("hooks on saved tensors", lambda: top_hooks() is not None),
    ("dispatch modes", lambda: tuple(map(_kind_of_mode, _get_current_dispatch_mode_stack()))),
    ("function modes", lambda: tuple(map(_kind_of_mode, _get_current_function_mode_stack()))),
]


def current_settings() -> tuple[Any, ...]:
    """Settings of PyTorch by which a step chooses what it computes, and how."""
    return tuple([read() for _, read in _SETTINGS])


def settings_changed(before: tuple[Any, ...]) -> str:
    """Which setting is not what it was, in words; empty where all are."""
    for (name, _), now, then in zip(_SETTINGS, current_settings(), before, strict=True):
        if now != then:
            return f"{name} is {now} instead of {then}"
    return ""


class Arguments:
    """The arguments that a step was captured with: tensors by their geometry, plain values by type
    and value, other objects by identity."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self._spec = spec
        self._leaves = [_token(leaf) for leaf in leaves]

    def difference(self, leaves: Sequence[Any], spec: TreeSpec) -> str:
        """What is different, in words; empty where nothing is."""
        if len(leaves) != len(self._leaves) or spec != self._spec:
            return "the arguments are nested in another way"
        for place, (leaf, before) in enumerate(zip(leaves, self._leaves, strict=True)):
            if (now := _token(leaf)) != before:
                return f"argument {place} is {_words(now)} instead of {_words(before)}"
        return ""


def _token(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (
            type(leaf), tuple(leaf.shape), _strides(leaf), leaf.dtype, leaf.device,
            leaf.requires_grad, leaf.is_inference(), _attributes(leaf),
        )  # fmt: skip
    if isinstance(leaf, float):
        return float, leaf.hex()
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    return _Same(leaf)


def _attributes(tensor: torch.Tensor) -> tuple[Any, ...]:
    own = vars(tensor)
    return tuple((name, _token(own[name])) for name in sorted(own)) if own else ()


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


class _Same:
    """An object, by identity."""

    __slots__ = ("_id", "_kept", "name")

    def __init__(self, value: Any) -> None:
        self.name = type(value).__name__
        self._id = id(value)
        try:
            self._kept: Any = weakref.ref(value)
        except TypeError:
            self._kept = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._id == other._id and self._kept() is not None

    def __hash__(self) -> int:
        return self._id


def _words(token: Any) -> str:
    if isinstance(token, _Same):
        return f"another {token.name}"
    if len(token) == 2:
        return repr(float.fromhex(token[1]) if token[0] is float else token[1])
    _, shape, stride, dtype, device, requires_grad, inference, own = token
    text = f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}, strides {list(stride)}"
    text += ", requires grad" if requires_grad else ""
    text += ", of inference mode" if inference else ""
    return text + "".join(f", with {name} {_words(value)}" for name, value in own)


class Inputs:
    """The tensors that a program takes from where they lie between steps."""

    def __init__(self, program: StepProgram, values: Sequence[Any]) -> None:
        tensors = [
            (place, one) for place, one in enumerate(program.inputs) if one.geometry is not None
        ]
        self._passing = [pair for pair in tensors if pair[1].kind in (Kind.ARGUMENT, Kind.GRADIENT)]
        self._staying = [pair for pair in tensors if pair not in self._passing]
        self._places = [place for place, _ in self._staying]
        self._looks: list[tuple[Any, ...] | None] = [None] * len(self._staying)
        """Of each that stays, when last looked at; None: look again."""
        self._keys: dict[int, int] = {}
        """The storages that these are on, by place."""
        self._storage_of: dict[int, int] = {}
        """`Input.storage` by storage, of those."""
        self._offsets = any(
            getattr(node.target, "_opname", "") in _PLACED_BY_NUMBER
            for node in program.graph_module.graph.nodes
        )
        self.difference(values)

    def difference(self, values: Sequence[Any]) -> str:
        """What is different, in words; empty where nothing is. `values`: of all inputs."""
        try:
            looks = _looks([*map(values.__getitem__, self._places)])
        except TypeError:
            looks = []
        moved = []
        if looks != self._looks:
            for place, one in (*self._staying, *self._passing):
                if not isinstance(values[place], torch.Tensor):
                    return f"{one.place.path} is not a tensor"
            moved = [n for n, look in enumerate(looks) if look != self._looks[n]]
        for number in moved:
            self._looks[number] = None
            self._keys.pop(self._staying[number][0], None)
        if moved:
            self._storage_of = {
                self._keys[place]: one.storage
                for place, one in self._staying
                if place in self._keys
            }
        different = self._look_at([*(self._staying[n] for n in moved), *self._passing], values)
        if not different:
            for number in moved:
                self._looks[number] = looks[number]
        return different

    def _look_at(self, moved: list[tuple[int, Input]], values: Sequence[Any]) -> str:
        """Geometry and storage of tensors that do not stay where they were."""
        for place, one in moved:
            if not isinstance(values[place], torch.Tensor):
                return f"{one.place.path} is not a tensor"
            if different := self._geometry(one, values[place]):
                return different
        storage_of = dict(self._storage_of) if moved else {}
        keys = {storage: key for key, storage in storage_of.items()}
        for place, one in moved:
            key = values[place].untyped_storage()._cdata
            if storage_of.setdefault(key, one.storage) != one.storage:
                return f"{one.place.path} shares its memory with another tensor"
            if keys.setdefault(one.storage, key) != key:
                return f"{one.place.path} shares its memory no more"
            if one.kind not in (Kind.ARGUMENT, Kind.GRADIENT):
                self._keys[place] = key
                self._storage_of[key] = one.storage
        return ""

    def _geometry(self, one: Input, tensor: torch.Tensor) -> str:
        wanted = one.geometry
        assert wanted is not None
        if tensor.layout is not torch.strided:
            return f"{one.place.path} is {tensor.layout}"
        offset = int(tensor.storage_offset()) if self._offsets else wanted.offset
        now = Geometry(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), offset,
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        if now != wanted:
            return (
                f"{one.place.path} is {_geometry_words(now)} instead of {_geometry_words(wanted)}"
            )
        if tensor.device != one.device:
            return f"{one.place.path} is on {tensor.device} instead of {one.device}"
        if tensor.requires_grad != one.requires_grad:
            return f"{one.place.path} requires {'a' if tensor.requires_grad else 'no'} gradient now"
        return ""


def _looks(tensors: list[Any]) -> list[tuple[Any, ...] | None]:
    """All that can change of a tensor while it stays the same object, without a look at its
    content. Raises TypeError where one is no tensor."""
    one = torch.Tensor
    return [
        *zip(
            map(id, tensors),
            map(one.data_ptr, tensors),
            map(one.size, tensors),
            map(one.stride, tensors),
            map(_requires_grad, tensors),
            map(_dtype, tensors),
            strict=True,
        )
    ]


_requires_grad = operator.attrgetter("requires_grad")
_dtype = operator.attrgetter("dtype")


def _geometry_words(geometry: Geometry) -> str:
    kind = str(geometry.dtype).removeprefix("torch.")
    return f"{list(geometry.shape)} {kind}, strides {list(geometry.stride)}"


def aliases_difference(program: StepProgram, leaves: Sequence[Any]) -> str:
    """Whether places that shared a storage do so as they did, in words; empty where they do."""
    for group in program.aliases:
        first: torch.Tensor | None = None
        offset = 0
        for place, (dtype, size, stride, start) in group:
            try:
                tensor = place.read(leaves)
            except (KeyError, IndexError, AttributeError):
                tensor = None
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                return f"{place.path} is no longer the tensor it was"
            if first is None:
                first, offset = tensor, int(tensor.storage_offset()) - start
            if (
                tensor.untyped_storage()._cdata != first.untyped_storage()._cdata
                or int(tensor.storage_offset()) - start != offset
                or (tensor.dtype, tensor.size(), tensor.stride()) != (dtype, size, stride)
            ):
                return f"{place.path} shares its memory with {group[0][0].path} in another way"
    return ""


class Gradients:
    """Which parameters had a gradient before the step, where the step does not free it first."""

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._parameters = list(parameters)
        self._there = [parameter.grad is not None for _, parameter in self._parameters]

    def and_of(self, places: Iterable[tuple[Place, bool]]) -> Gradients:
        """And those of tensors that are not in the model but were there before the step."""
        known = {id(parameter) for _, parameter in self._parameters}
        for place, there in places:
            if id(place.owner) not in known:
                self._parameters.append((place.path.removesuffix(".grad"), place.owner))
                self._there.append(there)
        return self

    def without(self, freed: Iterable[Place]) -> Gradients:
        """Those that are not freed before the graph runs."""
        owners = {id(place.owner) for place in freed if place.key == "grad"}
        rest = Gradients(())
        for pair, there in zip(self._parameters, self._there, strict=True):
            if id(pair[1]) not in owners:
                rest._parameters.append(pair)
                rest._there.append(there)
        return rest

    def difference(self) -> str:
        if [parameter.grad is not None for _, parameter in self._parameters] == self._there:
            return ""
        for (name, parameter), there in zip(self._parameters, self._there, strict=True):
            if (parameter.grad is not None) != there:
                return f"{name} has {'no' if there else 'a'} gradient before the step"
        return ""


def _holds(pin: Pin, value: Any) -> bool:
    """Whether the step would take the same branch, or read the same number, now."""
    if type(value) is not type(pin.value):
        return False
    return pin.holds() if pin.test is not None else same(pin.value, value)


class Guards:
    """All of it, for one program."""

    def __init__(
        self,
        program: StepProgram,
        *,
        arguments: Arguments,
        state: PythonState,
        gradients: Gradients,
        settings: tuple[Any, ...],
        values: Sequence[Any],
    ) -> None:
        """`values`: of the program's inputs, now. The rest is from before the captured step."""
        self._arguments = arguments
        self._state = state
        self._gradients = gradients.and_of(program.gradients_before).without(program.frees)
        self._settings = settings
        self._pins = program.pins
        self._inputs = Inputs(program, values)
        self._foreseen = ForeseenValues(program)
        self._program = program
        self._scalars = [
            (place, one) for place, one in enumerate(program.inputs) if one.kind is Kind.SCALAR
        ]

    def before_reading(self, leaves: Sequence[Any], spec: TreeSpec) -> str:
        """What is different of all but the inputs' values; empty where nothing is."""
        if different := self._arguments.difference(leaves, spec):
            return different
        if current_settings() != self._settings:
            return settings_changed(self._settings)
        for change in self._state.changed():
            return str(change)
        for pin in self._pins:
            if not _holds(pin, value := pin.place.read(leaves)):
                return f"{pin.place.path} is {value!r} instead of {pin.value!r}"
        if different := aliases_difference(self._program, leaves):
            return different
        return self._gradients.difference()

    def of_inputs(self, values: Sequence[Any]) -> str:
        """What is different of the inputs' values."""
        for place, one in self._scalars:
            now, before = type(values[place]), type(one.value)
            if now is not before:
                return f"{one.place.path} is a {now.__name__}, no {before.__name__}"
        return self._inputs.difference(values)

    def of_foreseen(self, values: Sequence[Any]) -> str:
        """What is different of the values that get out of tensors. Asked last: `values` are such as
        the program takes."""
        return self._foreseen.difference(values)
