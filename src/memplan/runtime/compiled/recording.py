"""Records a plain training step as a graph, op by op, where the dispatcher sees it.

The step runs on its real tensors, so the graph has the kernels that PyTorch chose and storages of
the sizes that it asked for. Tensors are told apart by storage and geometry: autograd's copies of a
tensor, and views of the same place, are one node.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from memplan.runtime.compiled.in_place import GEOMETRY
from memplan.runtime.compiled.lifting import Found, Places
from memplan.runtime.compiled.lines import user_line
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.program import (
    FACTS,
    By,
    Facts,
    Geometry,
    Input,
    Kind,
    Pin,
    Place,
    StorageFacts,
)
from memplan.runtime.compiled.random_state import read_random_state, write_random_state
from memplan.runtime.compiled.scalars import Scalar, Symbolic, scalar_of, symbolic
from memplan.runtime.compiled.split import pieces
from memplan.runtime.tape.replayable import Traits, traits_of
from memplan.runtime.tape.storages import is_plain

aten = torch.ops.aten
ITEM = aten._local_scalar_dense.default
LIFT = (aten.lift_fresh.default, aten.lift.default)
LIFT_COPY = aten.lift_fresh_copy.default
_Key = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("index", "key")
    index: int
    key: int


class Recorder(TorchDispatchMode):
    """Give it as a mode to one step; `refusal` tells why no graph came out, if none did."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self.graph = fx.Graph()
        self.inputs: list[Input] = []
        self.pins: dict[tuple[int, Any], Pin] = {}
        self.storages: list[StorageFacts] = []
        self.refusal: NotCapturable | None = None
        self.went_backward = False
        self.updating = 0
        """Above 0 inside `optimizer.step()`."""
        self.given: dict[str, Scalar] = {}
        """Numbers that a call takes as plain floats only, by the name of the argument."""
        self._stream = _stream()
        self._live: dict[int, _StorageRef] = {}
        self._views: list[dict[_Key, fx.Node]] = []
        self._storage_of: dict[fx.Node, int] = {}
        self._placeholders: list[fx.Node] = []
        self._generators: dict[int, fx.Node] = {}
        self._random: dict[str, torch.Tensor] = {}
        """The state of each default generator after the last op that moved it."""
        self._flops = 0
        self._gate: tuple[fx.Node, Callable[[Any], Any]] | None = None
        self._gated: set[fx.Node] = set()
        self._fixed: set[int] = set()
        """Storages whose content is the same in each step: `torch.arange(8)`."""

    # The dispatcher's side

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if self.refusal is None and func.namespace != "profiler":
                try:
                    return self._record(func, args, kwargs)
                except NotCapturable as refusal:
                    self.refuse(refusal)
            return func(*_plain(args), **_plain(kwargs))

    def refuse(self, refusal: NotCapturable) -> None:
        """The first reason counts."""
        if self.refusal is None:
            self.refusal = refusal

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in LIFT:
            return self._constant(func, args[0])
        if _stream() != self._stream:
            raise NotCapturable("an operator on another CUDA stream", user_line())
        traits = traits_of(func)
        names = [argument.name for argument in func._schema.arguments]
        given, self.given = (self.given, {}) if self.given else ({}, self.given)
        mapped = self._mapped(args)
        mapped_kwargs = self._mapped(kwargs)
        _check_supported(func)
        if not self._is_fixed((mapped, mapped_kwargs)):
            _check_values(func, args)
        for name, scalar in given.items():
            if name in mapped_kwargs:
                mapped_kwargs[name] = scalar.node
            elif name in names and names.index(name) < len(mapped):
                mapped[names.index(name)] = scalar.node
        chains = self._chains(func, traits, args, kwargs)
        if func is ITEM:
            return self._item(mapped, _value_of(args[0]))
        result = func(*_plain(args), **_plain(kwargs))
        self._drawn(chains)
        self._flops = _flops(func, args, kwargs, result)
        self._emit(func, traits, (mapped, mapped_kwargs), args, result, chains)
        return result

    def _emit(
        self,
        func: Any,
        traits: Traits,
        mapped: tuple[list[Any], dict[str, Any]],
        args: tuple[Any, ...],
        result: Any,
        chains: tuple[str, ...],
    ) -> None:
        outputs = list(_tensors(result))
        if not outputs and not traits.written and not chains:
            if result is None and any(True for _ in _tensors(args)):
                raise NotCapturable(
                    f"{traits.name} returns nothing and says of no tensor that it writes it",
                    user_line(),
                )
            return  # an answer about shapes, types or devices
        new = [t for t in outputs if t.untyped_storage()._cdata not in self._live]
        if not new and not traits.written and traits.statistics is None and not chains:
            self._alias(func, mapped, outputs, result)
            return
        if torch.Tag.inplace_view in func.tags:
            self._moved(args, traits)
            return
        parts = pieces(func, args, *mapped)
        if parts is None:
            self._add(func, traits, mapped, outputs, result, chains)
            return
        for number, part in enumerate(parts):
            one = [outputs[number]] if outputs else []
            self._add(func, traits, part, one, one or None, chains, split=True)

    def _add(
        self,
        func: Any,
        traits: Traits,
        mapped: tuple[list[Any], dict[str, Any]],
        outputs: list[torch.Tensor],
        result: Any,
        chains: tuple[str, ...],
        split: bool = False,
    ) -> None:
        """An op that makes or writes something."""
        args, kwargs = mapped
        used = self._storages_in((args, kwargs))
        written = self._written(traits, args, kwargs)
        like = func._opname in _SHAPE_ONLY
        fixed = not chains and self._is_fixed((args, kwargs), like)
        node = self._call(func, tuple(args), kwargs, effect=True)
        made = self._register(node, outputs, result, traits.name)
        if fixed:
            self._fixed.update(made)
        else:
            self._fixed.difference_update(written)
        backward = torch._C._current_graph_task_id() != -1
        self.went_backward |= backward
        node.meta[FACTS] = Facts(
            reads=() if like else used,
            writes=written,
            makes=made,
            uses=used,
            chains=chains,
            source=user_line(),
            backward=backward,
            update=self.updating > 0,
            flops=self._flops,
            splits=split,
        )

    def _register(
        self, node: fx.Node, outputs: list[torch.Tensor], result: Any, name: str
    ) -> tuple[int, ...]:
        """Knows the tensors of a result, and the nodes that give them."""
        made = []
        several = not isinstance(result, torch.Tensor)
        for path, tensor in _with_paths(result):
            key = tensor.untyped_storage()._cdata
            if key not in self._live:
                made.append(self._storage(tensor, node, name))
            index = self._live[key].index
            geometry = _key(tensor)
            if geometry in self._views[index]:
                continue
            source = node
            if several:
                for item in path:
                    source = self._free(source, item)
            self._storage_of[source] = index
            self._views[index][geometry] = source
            source.meta[GEOMETRY] = geometry_of(tensor)
        return tuple(made)

    def _call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        effect: bool = False,
    ) -> fx.Node:
        """A node, behind the gate that is closed around it."""
        needs = any(node in self._gated for node in _nodes((args, kwargs)))
        if self._gate is None or not (effect or needs):
            if needs:
                raise NotCapturable("it uses what a scaler may leave out", user_line())
            return self.graph.call_function(function, args, kwargs)
        skip, unless = self._gate
        node = self.graph.call_function(unless(function), (skip, *args), kwargs)
        self._gated.add(node)
        return node

    @contextmanager
    def gated(self, skip: fx.Node, unless: Callable[[Any], Any]) -> Iterator[None]:
        """Inside, operators are left out where `skip` is true; `unless` makes them so."""
        before, self._gate = self._gate, (skip, unless)
        try:
            yield
        finally:
            self._gate = before

    def _free(self, source: fx.Node, item: int) -> fx.Node:
        node = self._call(operator.getitem, (source, item))
        node.meta[FACTS] = Facts(free=True)
        return node

    def _storage(self, tensor: torch.Tensor, maker: fx.Node, name: str) -> int:
        storage = tensor.untyped_storage()
        reference = _StorageRef(storage, self._died)
        reference.key = storage._cdata
        reference.index = len(self.storages)
        self._live[reference.key] = reference
        self.storages.append(StorageFacts(storage.nbytes(), tensor.device, maker, name))
        self._views.append({})
        return reference.index

    def _died(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(storage, _StorageRef)
        if self._live.get(storage.key) is storage:
            del self._live[storage.key]

    def _alias(
        self,
        func: Any,
        mapped: tuple[list[Any], dict[str, Any]],
        outputs: list[torch.Tensor],
        result: Any,
    ) -> None:
        """An op that only makes views: a node where there is none for that view yet."""
        if all(self._known(tensor) for tensor in outputs):
            return
        node = self._call(func, tuple(mapped[0]), mapped[1])
        self._register(node, outputs, result, "")
        node.meta[FACTS] = Facts(free=True)

    def _moved(self, args: tuple[Any, ...], traits: Traits) -> None:
        """An op that changes how a tensor lies on its storage and nothing in it, as `t_`."""
        for tensor in _tensors(args):
            self.node_of(tensor)

    def _known(self, tensor: torch.Tensor) -> bool:
        found = self._live.get(tensor.untyped_storage()._cdata)
        return found is not None and _key(tensor) in self._views[found.index]

    # Arguments

    def _mapped(self, value: Any) -> Any:
        """Arguments with nodes in place of tensors, numbers that were computed and generators."""
        if isinstance(value, torch.Tensor):
            scalar = scalar_of(value)
            return self.node_of(value) if scalar is None else self._mapped(symbolic(scalar))
        if isinstance(value, Symbolic):
            scalar = scalar_of(value)
            if scalar is None:
                raise NotCapturable("a size that is not known yet", user_line())
            scalar.check()
            return scalar.value if scalar.node is None else scalar.node
        if isinstance(value, (list, tuple)):
            return [self._mapped(item) for item in value]
        if isinstance(value, dict):
            return {key: self._mapped(item) for key, item in value.items()}
        if isinstance(value, torch.Generator):
            return self._generator(value)
        if value is None or isinstance(value, _ARGUMENTS):
            return value
        raise NotCapturable(f"an operator is given a {type(value).__name__}", user_line())

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node that gives a tensor. One that is not known comes from before the step."""
        if not is_plain(tensor):
            raise NotCapturable(
                f"a tensor of type {type(tensor).__name__}, layout {tensor.layout}",
                user_line(),
            )
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is None:
            self._lift(tensor)
            found = self._live[tensor.untyped_storage()._cdata]
        key = _key(tensor)
        node = self._views[found.index].get(key)
        if node is None:
            node = self._view(found.index, tensor)
            self._views[found.index][key] = node
        return node

    def _view(self, index: int, tensor: torch.Tensor) -> fx.Node:
        """Another view of a storage, where no op was seen to make it."""
        conj, neg = tensor.is_conj(), tensor.is_neg()
        for (dtype, _, _, _, other_conj, other_neg), node in self._views[index].items():
            if dtype == tensor.dtype and conj == other_conj and neg == other_neg:
                view = self._call(
                    aten.as_strided.default,
                    (node, list(tensor.size()), list(tensor.stride()), tensor.storage_offset()),
                )
                view.meta[FACTS] = Facts(free=True)
                self._storage_of[view] = index
                return view
        raise NotCapturable("a tensor read as another type by means unseen", user_line())

    def _lift(self, tensor: torch.Tensor) -> None:
        found = self.places.find(tensor)
        if found is None:
            raise NotCapturable(
                f"a tensor {list(tensor.shape)} that is no argument of the step, not of the model "
                "and not of the optimizer, and that no variable of the step holds",
                user_line(),
                "pass it to the step as an argument",
            )
        self.lift(found)

    def lift(self, found: Found) -> fx.Node:
        """A tensor from before the step becomes an input."""
        tensor = found.tensor
        node = self._placeholder()
        storage = self._live.get(tensor.untyped_storage()._cdata)
        index = self._storage(tensor, node, found.place.path) if storage is None else storage.index
        self._storage_of[node] = index
        self._views[index].setdefault(_key(tensor), node)
        self.inputs.append(
            Input(
                node.name,
                found.kind,
                found.place,
                index,
                geometry_of(tensor),
                tensor.device,
                tensor.requires_grad,
            )
        )
        return node

    def _placeholder(self) -> fx.Node:
        name = f"in_{len(self.inputs)}"
        last = self._placeholders[-1] if self._placeholders else None
        where = (
            self.graph.inserting_after(last)
            if last
            else self.graph.inserting_before(_first(self.graph))
        )
        with where:
            node = self.graph.placeholder(name)
        node.meta[FACTS] = Facts()
        self._placeholders.append(node)
        return node

    def _generator(self, generator: torch.Generator) -> fx.Node:
        node = self._generators.get(id(generator))
        if node is None:
            node = self._placeholder()
            place = Place("a random generator", By.HELD, generator)
            self.inputs.append(Input(node.name, Kind.CONSTANT, place))
            self._generators[id(generator)] = node
        return node

    def _constant(self, func: Any, tensor: torch.Tensor) -> Any:
        """A tensor made from Python data: each step gets a copy of its own."""
        if not tensor.untyped_storage().resizable():
            raise NotCapturable(
                "a tensor on memory that is not PyTorch's, as of NumPy",
                user_line(),
                "pass it to the step as an argument",
            )
        result = func(tensor)
        if self._known(result):
            return result
        if not is_plain(result):
            raise NotCapturable(f"a tensor of type {type(result).__name__}", user_line())
        node = self._placeholder()
        copy = _copy(result)
        place = Place("a constant", By.HELD, copy)
        held = self._storage(copy, node, "a constant")
        self._storage_of[node] = held
        self.inputs.append(
            Input(node.name, Kind.CONSTANT, place, held, geometry_of(copy), copy.device)
        )
        made = self._call(LIFT_COPY, (node,), effect=True)
        storages = self._register(made, [result], result, "torch.tensor")
        self._fixed.update(storages)
        made.meta[FACTS] = Facts(reads=(held,), uses=(held,), makes=storages, source=user_line())
        return result

    # Numbers

    def scalar_input(self, place: Place, value: float) -> Any:
        """A Python number that may be another one at each step."""
        node = self._placeholder()
        number = len(self.inputs)
        self.inputs.append(Input(node.name, Kind.SCALAR, place, value=value))
        return symbolic(Scalar(self, value, node, frozenset({number})))

    def late_scalar(self, value: float) -> Any:
        """A number that is not the same in the next step, though nothing computes it."""
        return symbolic(Scalar(self, value, None, late=True))

    def _item(self, mapped: list[Any], value: Any) -> Any:
        if isinstance(value, (complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotCapturable("the value of a complex or symbolic tensor", user_line())
        if self._is_fixed(mapped):
            return value
        node = self._call(ITEM, tuple(mapped), effect=True)
        used = self._storages_in(mapped)
        node.meta[FACTS] = Facts(
            reads=used, uses=used, source=user_line(), update=self.updating > 0
        )
        return symbolic(Scalar(self, value, node, measured=True))

    def arithmetic(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
        node = self._call(function, arguments)
        node.meta[FACTS] = Facts(free=True)
        return node

    def escaped(self, scalar: Scalar, how: str) -> None:
        if scalar.measured:
            self.refuse(
                NotCapturable(
                    how, user_line(), "keep such code out of the step, or run the step plainly"
                )
            )
            return
        for number in scalar.places:
            one = self.inputs[number]
            known = self.pins.get((number, None))
            if known is None:
                self.pins[number, scalar.test] = Pin(one.place, one.value, scalar.test)

    def _is_fixed(self, mapped: Any, like: bool = False) -> bool:
        """Whether arguments are the same in each step. `like`: only shapes of tensors matter."""
        for node in _nodes(mapped):
            index = self._storage_of.get(node)
            if index is None or not (like or index in self._fixed):
                return False
        return True

    def note_results(self) -> None:
        """Writes into each node's facts which storage it shows."""
        for node in self.graph.nodes:
            if node in self._storage_of:
                node.meta[FACTS] = replace(node.meta[FACTS], shows=self._storage_of[node])

    def is_gated(self, node: fx.Node) -> bool:
        """Whether there may be nothing where the node's result should be."""
        return node in self._gated

    # Facts

    def _storages_in(self, mapped: Any) -> tuple[int, ...]:
        seen: dict[int, None] = {}
        for node in _nodes(mapped):
            index = self._storage_of.get(node)
            if index is not None:
                seen[index] = None
        return tuple(seen)

    def _written(self, traits: Traits, args: list[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
        found = []
        for position, name in traits.written:
            found.append(args[position] if position < len(args) else kwargs.get(name))
        if traits.statistics is not None:
            mean, variance, flag = traits.statistics
            if flag >= len(args) or args[flag]:
                found += [args[position] for position in (mean, variance) if position < len(args)]
        return self._storages_in(found)

    def _chains(
        self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, ...]:
        if func._opname in _HIDDEN_STATE:
            return ("hidden state",)
        if func.namespace not in _KNOWN:
            return (f"operators of {func.namespace}",)
        if not traits.draws(args, kwargs):
            return ()
        generator = kwargs.get("generator")
        device = kwargs.get("device") or next((t.device for t in _tensors(args)), "cpu")
        device = torch.device(device)
        if generator is not None and generator is not torch.default_generator:
            return (f"generator {id(generator):x}",)
        self._check_random(device)
        return (_chain(device),)

    # Random numbers

    def _check_random(self, device: torch.device) -> None:
        """Nothing but recorded ops may move a generator. Raises NotCapturable."""
        before = self._random.get(_chain(device))
        with _disable_current_modes():
            same = before is None or torch.equal(before, read_random_state(device))
        if not same:
            raise NotCapturable(
                "random numbers are drawn or seeded where PyTorch's dispatcher does not see it",
                user_line(),
            )

    def _drawn(self, chains: tuple[str, ...]) -> None:
        for chain in chains:
            if chain.startswith(_RANDOM):
                device = torch.device(chain.removeprefix(_RANDOM))
                self._random[chain] = read_random_state(device)

    def read_random_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Python has read the state of the default generator."""
        if self.refusal is not None:
            return
        node = self._call(read_random_state, (device,), effect=True)
        made = self._storage(state, node, "a random state")
        self.storages[made] = replace(self.storages[made], bytes=0)  # no operator makes it
        self._views[made][_key(state)] = node
        self._storage_of[node] = made
        node.meta[FACTS] = Facts(makes=(made,), chains=(_chain(device),), source=user_line())

    def write_random_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Python is about to set the state of the default generator."""
        if self.refusal is not None:
            return
        if not self._known(state):
            self.refuse(NotCapturable("a random state from before the step", user_line()))
            return
        given = self.node_of(state)
        node = self._call(write_random_state, (given, device), effect=True)
        used = self._storages_in(given)
        node.meta[FACTS] = Facts(
            reads=used, uses=used, chains=(_chain(device),), source=user_line()
        )
        self._random[_chain(device)] = state


def _chain(device: torch.device) -> str:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return f"{_RANDOM}{device}"


_RANDOM = "random "
_KNOWN = frozenset({"aten", "prims", "prim", "torchvision"})
_HIDDEN_STATE = frozenset({"_cudnn_rnn", "miopen_rnn"})
"""They advance a dropout state that their schema does not show as written."""
_ARGUMENTS = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _value_of(tensor: torch.Tensor) -> Any:
    """Of one element. A fake tensor has none: what is computed from it serves sizes alone."""
    try:
        return ITEM(tensor)
    except DataDependentOutputException:
        return torch.ones((), dtype=tensor.dtype).item()


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


_SHAPE_ONLY = frozenset(
    {
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
        "new_empty", "new_empty_strided",
    }
)  # fmt: skip
"""Ops that read of their argument only how it lies."""


def _check_supported(func: Any) -> None:
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        raise NotCapturable(f"communication between processes ({func})", user_line())
    if func.namespace == "aten" and func._opname in ("resize_", "resize_as_", "_resize_output_"):
        raise NotCapturable("a tensor whose storage is resized", user_line())


def _check_values(func: Any, args: tuple[Any, ...]) -> None:
    """Of an op on what differs between steps."""
    if torch.Tag.dynamic_output_shape in func.tags and not _by_numbers(func, args):
        raise NotCapturable(
            f"a result whose shape depends on values ({func})",
            user_line(),
            "use torch.where or a mask in place of it",
        )
    if torch.Tag.data_dependent_output in func.tags and func is not ITEM:
        raise NotCapturable(f"a Python value computed from tensors ({func})", user_line())


def _by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is an indexing by numbers: only one by a mask has a shape that depends on it."""
    return func is aten.index.Tensor and not any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    )


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return Geometry(
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _key(tensor: torch.Tensor) -> _Key:
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    assert isinstance(copied, torch.Tensor)
    return copied


def _first(graph: fx.Graph) -> fx.Node:
    return next(iter(graph.nodes), graph._root)


def _plain(value: Any) -> Any:
    """With numbers in place of symbolic ones."""
    if isinstance(value, torch.Tensor):
        scalar = scalar_of(value)
        return value if scalar is None else scalar.value
    if isinstance(value, Symbolic):
        scalar = scalar_of(value)
        return value if scalar is None else scalar.value
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _with_paths(
    value: Any, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _with_paths(item, (*path, number))


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)
    elif isinstance(value, dict):
        yield from _nodes(list(value.values()))
