"""Records a plain training step as a graph, op by op, where the dispatcher sees it.

The step runs on its real tensors, so the graph has the kernels that PyTorch chose and storages of
the sizes that it asked for. Tensors are told apart by storage and geometry: autograd's copies of a
tensor, and views of the same place, are one node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.runtime.compiled.generators import (
    Generators,
    address_of,
    chain_of,
    chain_of_own,
    is_default,
)
from memplan.runtime.compiled.in_place import GEOMETRY
from memplan.runtime.compiled.known_storages import KnownStorages
from memplan.runtime.compiled.lifting import Found, Places
from memplan.runtime.compiled.lines import user_line
from memplan.runtime.compiled.nested import (
    copy_of,
    geometry_of,
    key_of,
    nodes_in,
    plain,
    tensors_in,
    with_paths,
)
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.op_limits import (
    HIDDEN_STATE,
    ITEM,
    KNOWN,
    SHAPE_ONLY,
    check_supported,
    check_values,
    current_stream,
    flops_of,
    value_of,
)
from memplan.runtime.compiled.program import (
    FACTS,
    By,
    Facts,
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
LIFT = (aten.lift_fresh.default, aten.lift.default)
LIFT_COPY = aten.lift_fresh_copy.default


class _Call(NamedTuple):
    """An op about to run, and its arguments as nodes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mapped: list[Any]
    mapped_kwargs: dict[str, Any]
    chains: tuple[str, ...]


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
        self._stream = current_stream()
        self._known = KnownStorages(self.storages)
        self._placeholders: list[fx.Node] = []
        self._generators: dict[int, fx.Node] = {}
        self.generator_states = Generators(places.generators)
        self._flops = 0
        self._gate: tuple[fx.Node, Callable[[Any], Any]] | None = None
        self._gated: set[fx.Node] = set()

    # The dispatcher's side

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            watched = self.refusal is None and func.namespace != "profiler"
            ready = self._guarded(self._prepare, func, args, kwargs) if watched else None
            # The op runs once, whatever becomes of its recording.
            result = value_of(args[0]) if func is ITEM else func(*plain(args), **plain(kwargs))
            noted = None if ready is None else self._guarded(self._note, ready, result)
            return result if noted is None else noted

    def _guarded(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """A part of recording. What it raises ends the recording and not the step."""
        try:
            return part(*arguments)
        except NotCapturable as refusal:
            self.refuse(refusal)
        except Exception as fault:
            self.refuse(
                NotCapturable(f"a fault of memplan: {fault!r}", user_line(), "please report it")
            )
        return None

    def refuse(self, refusal: NotCapturable) -> None:
        """The first reason counts."""
        if self.refusal is None:
            self.refusal = refusal

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """What must be known of an op before it runs."""
        if func in LIFT:
            return _Call(func, args, kwargs, [], {}, ())
        if current_stream() != self._stream:
            raise NotCapturable("an operator on another CUDA stream", user_line())
        traits = traits_of(func)
        names = [argument.name for argument in func._schema.arguments]
        given, self.given = (self.given, {}) if self.given else ({}, self.given)
        mapped = self._mapped(args)
        mapped_kwargs = self._mapped(kwargs)
        check_supported(func)
        if not self._known.is_fixed((mapped, mapped_kwargs)):
            check_values(func, args)
        for name, scalar in given.items():
            if name in mapped_kwargs:
                mapped_kwargs[name] = scalar.node
            elif name in names and names.index(name) < len(mapped):
                mapped[names.index(name)] = scalar.node
        chains = self._chains(func, traits, args, kwargs)
        return _Call(func, args, kwargs, mapped, mapped_kwargs, chains)

    def _note(self, call: _Call, result: Any) -> Any:
        """Records an op that has run. Gives what to return in place of its result, if anything."""
        func = call.func
        if func in LIFT:
            self._constant(call.args[0], result)
            return None
        if func is ITEM:
            return self._item(call.mapped, result)
        self.generator_states.drawn(call.chains)
        self._flops = flops_of(func, call.args, call.kwargs, result)
        mapped = call.mapped, call.mapped_kwargs
        self._emit(func, traits_of(func), mapped, call.args, result, call.chains)
        return None

    def _emit(
        self,
        func: Any,
        traits: Traits,
        mapped: tuple[list[Any], dict[str, Any]],
        args: tuple[Any, ...],
        result: Any,
        chains: tuple[str, ...],
    ) -> None:
        outputs = list(tensors_in(result))
        if not outputs and not traits.written and not chains:
            if result is None and any(True for _ in tensors_in(args)):
                raise NotCapturable(
                    f"{traits.name} returns nothing and says of no tensor that it writes it",
                    user_line(),
                )
            return  # an answer about shapes, types or devices
        new = [t for t in outputs if t.untyped_storage()._cdata not in self._known.live]
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
        used = self._known.of_nodes((args, kwargs))
        written = self._written(traits, args, kwargs)
        like = func._opname in SHAPE_ONLY
        fixed = not chains and self._known.is_fixed((args, kwargs), like)
        node = self._call(func, tuple(args), kwargs, effect=True)
        made = self._register(node, outputs, result, traits.name)
        if fixed:
            self._known.fixed.update(made)
        else:
            self._known.fixed.difference_update(written)
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
        for path, tensor in with_paths(result):
            key = tensor.untyped_storage()._cdata
            if key not in self._known.live:
                made.append(self._known.add(tensor, node, name))
            index = self._known.live[key].index
            geometry = key_of(tensor)
            if geometry in self._known.views[index]:
                continue
            source = node
            if several:
                for item in path:
                    source = self._free(source, item)
            self._known.of[source] = index
            self._known.views[index][geometry] = source
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
        needs = any(node in self._gated for node in nodes_in((args, kwargs)))
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

    def _alias(
        self,
        func: Any,
        mapped: tuple[list[Any], dict[str, Any]],
        outputs: list[torch.Tensor],
        result: Any,
    ) -> None:
        """An op that only makes views: a node where there is none for that view yet."""
        if all(self._known.has(tensor) for tensor in outputs):
            return
        node = self._call(func, tuple(mapped[0]), mapped[1])
        self._register(node, outputs, result, "")
        node.meta[FACTS] = Facts(free=True)

    def _moved(self, args: tuple[Any, ...], traits: Traits) -> None:
        """An op that changes how a tensor lies on its storage and nothing in it, as `t_`."""
        for tensor in tensors_in(args):
            self.node_of(tensor)

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
        found = self._known.live.get(tensor.untyped_storage()._cdata)
        if found is None:
            self._lift(tensor)
            found = self._known.live[tensor.untyped_storage()._cdata]
        key = key_of(tensor)
        node = self._known.views[found.index].get(key)
        if node is None:
            node = self._view(found.index, tensor)
            self._known.views[found.index][key] = node
        return node

    def _view(self, index: int, tensor: torch.Tensor) -> fx.Node:
        """Another view of a storage, where no op was seen to make it."""
        conj, neg = tensor.is_conj(), tensor.is_neg()
        for (dtype, _, _, _, other_conj, other_neg), node in self._known.views[index].items():
            if dtype == tensor.dtype and conj == other_conj and neg == other_neg:
                view = self._call(
                    aten.as_strided.default,
                    (node, list(tensor.size()), list(tensor.stride()), tensor.storage_offset()),
                )
                view.meta[FACTS] = Facts(free=True)
                self._known.of[view] = index
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
        storage = self._known.live.get(tensor.untyped_storage()._cdata)
        index = (
            self._known.add(tensor, node, found.place.path) if storage is None else storage.index
        )
        self._known.of[node] = index
        self._known.views[index].setdefault(key_of(tensor), node)
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
        node = self._generators.get(address_of(generator))
        if node is None:
            node = self._placeholder()
            place = Place("a random generator", By.HELD, generator)
            self.inputs.append(Input(node.name, Kind.CONSTANT, place))
            self._generators[address_of(generator)] = node
        return node

    def _constant(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """A tensor made from Python data: each step gets a copy of its own."""
        if not tensor.untyped_storage().resizable():
            raise NotCapturable(
                "a tensor on memory that is not PyTorch's, as of NumPy",
                user_line(),
                "pass it to the step as an argument",
            )
        if self._known.has(result):
            return
        if not is_plain(result):
            raise NotCapturable(f"a tensor of type {type(result).__name__}", user_line())
        node = self._placeholder()
        copy = copy_of(result)
        place = Place("a constant", By.HELD, copy)
        held = self._known.add(copy, node, "a constant")
        self._known.of[node] = held
        self.inputs.append(
            Input(node.name, Kind.CONSTANT, place, held, geometry_of(copy), copy.device)
        )
        made = self._call(LIFT_COPY, (node,), effect=True)
        storages = self._register(made, [result], result, "torch.tensor")
        self._known.fixed.update(storages)
        made.meta[FACTS] = Facts(reads=(held,), uses=(held,), makes=storages, source=user_line())

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
        if self._known.is_fixed(mapped):
            return value
        node = self._call(ITEM, tuple(mapped), effect=True)
        used = self._known.of_nodes(mapped)
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

    def note_results(self) -> None:
        """Writes into each node's facts which storage it shows."""
        for node in self.graph.nodes:
            if node in self._known.of:
                node.meta[FACTS] = replace(node.meta[FACTS], shows=self._known.of[node])

    def is_gated(self, node: fx.Node) -> bool:
        """Whether there may be nothing where the node's result should be."""
        return node in self._gated

    # Facts

    def _written(self, traits: Traits, args: list[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
        found = []
        for position, name in traits.written:
            found.append(args[position] if position < len(args) else kwargs.get(name))
        if traits.statistics is not None:
            mean, variance, flag = traits.statistics
            if flag >= len(args) or args[flag]:
                found += [args[position] for position in (mean, variance) if position < len(args)]
        return self._known.of_nodes(found)

    def _chains(
        self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, ...]:
        if func._opname in HIDDEN_STATE:
            return ("hidden state",)
        if func.namespace not in KNOWN:
            return (f"operators of {func.namespace}",)
        if not traits.draws(args, kwargs):
            return ()
        generator = kwargs.get("generator")
        device = kwargs.get("device") or next((t.device for t in tensors_in(args)), "cpu")
        device = torch.device(device)
        if generator is not None and not is_default(generator):
            chain = chain_of_own(generator)
        else:
            chain = chain_of(device)
        self.generator_states.check(chain)
        return (chain,)

    # Random numbers

    def read_random_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Python has read the state of the default generator."""
        if self.refusal is not None:
            return
        node = self._call(read_random_state, (device,), effect=True)
        made = self._known.add(state, node, "a random state")
        self.storages[made] = replace(self.storages[made], bytes=0)  # no operator makes it
        self._known.views[made][key_of(state)] = node
        self._known.of[node] = made
        node.meta[FACTS] = Facts(makes=(made,), chains=(chain_of(device),), source=user_line())

    def write_random_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Python is about to set the state of the default generator."""
        if self.refusal is not None:
            return
        if not self._known.has(state):
            self.refuse(NotCapturable("a random state from before the step", user_line()))
            return
        given = self.node_of(state)
        node = self._call(write_random_state, (given, device), effect=True)
        used = self._known.of_nodes(given)
        node.meta[FACTS] = Facts(
            reads=used, uses=used, chains=(chain_of(device),), source=user_line()
        )
        self.generator_states.moved(device, state)


_ARGUMENTS = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _first(graph: fx.Graph) -> fx.Node:
    return next(iter(graph.nodes), graph._root)
