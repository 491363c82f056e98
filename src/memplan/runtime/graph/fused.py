"""A region in Inductor's code: PyTorch's own way from a captured graph to kernels (`compile_fx`),
with our choice of what is kept for backward and of the order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from memplan.report.text import format_bytes
from memplan.runtime.graph.again import Again
from memplan.runtime.graph.compile import Budget
from memplan.runtime.graph.inductor import Kernels, compiled, uncached
from memplan.runtime.graph.inductor_buffers import Given
from memplan.runtime.graph.joint import Joint, copied, returned
from memplan.runtime.graph.passes import Pass, pass_without_saves
from memplan.runtime.graph.program import facts_of, program_of
from memplan.runtime.graph.recompute import within_budget
from memplan.types.errors import InfeasibleError, UsageError

log = logging.getLogger("memplan")


PARAMETER = "parameter_"
"""Begins the names of inputs of a backward pass that are inputs of forward: what forward saves of
these may be copies that lie in another way."""


def fused_region(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    budget: Budget,
    deadline_seconds: float,
) -> Callable[..., Any]:
    """What `torch.compile` makes of a graph, within a budget.

    Without one, PyTorch's partitioner chooses what is kept from forward to backward. With one, it
    does so too where that fits; else it is told what to recompute. The peak that is held against
    the budget is that of the code. Raises InfeasibleError, and UsageError for a budget of a graph
    of which not all is known.
    """
    parts = Parts(budget, deadline_seconds)
    with uncached(), config.patch(custom_partitioner_fn=parts):
        run: Any = compile_fx(module, inputs, inner_compile=parts.compile)
    code: Callable[..., Any] = run
    return code


class Parts(CustomPartitionerFn):
    """Of one graph, as `compile_fx` asks for them: first how to divide it, then the code of each
    part."""

    def __init__(self, budget: Budget, deadline_seconds: float) -> None:
        self._budget = budget
        self._seconds = deadline_seconds
        self._results: int | None = None
        self._memory = Memory(0)
        self.recomputed: frozenset[str] = frozenset()
        """Names of nodes that were chosen to run again, beside those that PyTorch chooses."""
        self.promised_bytes = 0
        """The peak over the parts that were compiled so far."""
        self.high_bytes = 0
        """The same with the largest workspaces that libraries may choose."""

    def uuid(self) -> None:
        """Not to be cached."""

    def __deepcopy__(self, _memo: Any) -> Parts:
        """PyTorch copies its settings, of which this is one."""
        return self

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._results = results = kwargs.pop("num_fwd_outputs")
        kwargs.pop("compiler", None)  # other partitioners do not know it
        joint = Joint(gm, joint_inputs, results, kwargs)
        if self._budget is None:
            return self._cut(joint, gm)
        chosen = self._choose(joint)
        self.recomputed = chosen.recomputed
        return chosen.parts

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """In the place of `compile_fx_inner`."""
        backward = bool(options.get("is_backward"))
        if not backward:
            results = None if options.get("is_inference") else self._results
            self._memory = self._no_memory(results)
        part = Part(module, inputs)
        given = self._memory.given(part, backward=backward)
        run, kernels = compiled(
            module,
            inputs,
            given,
            beside=self._memory.beside(given),
            deadline_seconds=self._seconds,
            **options,
        )
        if kernels is None:
            self._refuse("it has sizes that are not known")
            return run
        self._promise(self._memory.peak(part, given, kernels, backward=backward), kernels)
        return run

    def _promise(self, peak: int, kernels: Kernels) -> None:
        self.promised_bytes = max(self.promised_bytes, peak)
        self.high_bytes = max(self.high_bytes, peak + kernels.high_bytes)
        limit = self._budget
        if isinstance(limit, int) and peak > limit:
            raise InfeasibleError(
                f"a graph needs {format_bytes(peak)}, "
                f"{format_bytes(peak - limit)} more than its budget",
                f"budget={peak}, or a smaller batch",
            )
        log.info("memplan: a graph in fused kernels needs %s", format_bytes(peak))

    def _no_memory(self, results: int | None) -> Memory:
        """Before forward is compiled."""
        return Memory(results)

    def _complete(self, backward: fx.GraphModule, memory: Memory) -> None:
        """Before backward is compiled, when forward's code is known."""

    def _cut(self, joint: Joint, module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = cut(joint, module)
        _save_before_writes(forward, backward, joint.results)
        return forward, backward

    def _choose(self, joint: Joint) -> _Attempt:
        def attempt(replays: tuple[Again, ...]) -> _Attempt:
            module = copied(joint.module)
            names = names_again(joint, replays)
            tag(module.graph, names)
            parts = self._cut(joint, module)
            return _Attempt(self._look(parts), parts, names)

        def plain() -> Pass:
            try:
                return pass_without_saves(joint)
            except ValueError as error:
                self._refuse(str(error))
                raise

        return within_budget(plain, attempt, self._budget)

    def _look(self, parts: tuple[fx.GraphModule, fx.GraphModule]) -> int:
        """The peak over forward and backward."""
        memory, most = self._no_memory(self._results), 0
        for module, backward in zip(parts, (False, True), strict=True):
            mine = copied(module)
            if backward:
                self._complete(mine, memory)
            nodes = list(mine.graph.nodes)
            inputs = memory.as_they_lie(mine)
            seen = range(0 if backward else self._results or 0)
            nodes[-1].meta["user_visible_output_idxs"] = [
                place for place in seen if isinstance(nodes[-1].args[0][place], fx.Node)
            ]
            part = Part(mine, inputs)
            given = memory.given(part, backward=backward)
            _, kernels = compiled(
                mine,
                inputs,
                given,
                beside=memory.beside(given),
                deadline_seconds=self._seconds,
                look=True,
                is_backward=backward,
            )
            if kernels is None:
                self._refuse("it has sizes that are not known")
                return 0
            most = max(most, memory.peak(part, given, kernels, backward=backward))
        return most

    def _refuse(self, why: str) -> None:
        """Raises UsageError where something was promised."""
        if self._budget is not None:
            raise UsageError(f"no budget for this graph: {why}", "no budget")


@dataclass(frozen=True, eq=False)
class _Attempt:
    peak_bytes: int
    parts: tuple[fx.GraphModule, fx.GraphModule]
    recomputed: frozenset[str]


class Part:
    """What a graph is given and returns, before Inductor changes it."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        nodes = list(module.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        self.inputs = [
            Given(str(node.target), int(one.untyped_storage().nbytes()), True)
            if isinstance(one, torch.Tensor)
            else None
            for one, node in zip(inputs, places, strict=True)
        ]
        self.layouts = [_layout(one) for one in inputs]
        outputs = [one if isinstance(one, fx.Node) else None for one in nodes[-1].args[0]]
        self.outputs = [None if one is None else one.name for one in outputs]
        self.returned = [None if one is None else _layout(one.meta.get("val")) for one in outputs]


class Memory:
    """What is held beside the code of a forward pass, and of its backward pass."""

    def __init__(
        self, results: int | None, base: Sequence[int] = (), behind_bytes: int = 0
    ) -> None:
        self._results = results
        """How many of forward's outputs its caller gets; None for all."""
        self._base = base
        """Blocks that are there all the time."""
        self._workspace_bytes = 0
        """Kept by libraries."""
        self._behind_bytes = behind_bytes
        """What is asked for when backward has ended."""
        self._saved: dict[str, Given] = {}
        self._held: dict[str, int] = {}
        """Storages that the caller holds."""
        self._layouts: list[Any] = []
        self._strides: dict[str, tuple[int, ...]] = {}

    def given(self, part: Part, *, backward: bool) -> list[Given | None]:
        """Of each input of a part, in what memory it lies."""
        if not backward:
            return part.inputs
        return [None if one is None else self._saved.get(one.storage, one) for one in part.inputs]

    def lie_in(self, name: str) -> str | None:
        """The name of the storage of what forward saves."""
        found = self._saved.get(name)
        return None if found is None else found.storage

    def beside(self, given: Sequence[Given | None]) -> list[int]:
        """Blocks that are held while a part runs to which this is given."""
        lasting = {one.storage for one in given if one is not None and one.lasts}
        held = [size for name, size in self._held.items() if name not in lasting]
        return [*self._base, *held]

    def as_they_lie(self, module: fx.GraphModule) -> list[Any]:
        """Of a part's inputs: those that forward's code saves are laid out as it has them."""
        found = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                value, strides = node.meta["val"], self._strides.get(node.name)
                if strides is not None and value.stride() != strides:
                    value = value.as_strided(value.size(), strides)
                found.append(value)
        return found

    def peak(
        self, part: Part, given: Sequence[Given | None], kernels: Kernels, *, backward: bool
    ) -> int:
        """With all that the caller holds. That of forward is to be asked for first."""
        self._workspace_bytes = max(self._workspace_bytes, kernels.workspace_bytes)
        always = sum(self._base) + self._workspace_bytes
        if not backward:
            self._forward(part, given, kernels)
            return always + kernels.peak_bytes
        lasting = {one.storage for one in given if one is not None and one.lasts}
        beside = sum(self.beside(given))
        gradients = {
            one.storage: one.bytes
            for one in kernels.returned
            if one is not None and one.storage not in lasting
        }
        # Autograd copies gradients that lie in another way than their input, one at a time.
        copies = [
            of[-1]
            for of, into in zip(part.returned, self._layouts, strict=False)
            if of is not None and into is not None and of[:-1] != into[:-1]
        ]
        held = {**self._held, **{one.storage: one.bytes for one in given if one and one.lasts}}
        end: int = sum(held.values()) + sum(gradients.values()) + max([*copies, self._behind_bytes])
        return max(self._workspace_bytes + kernels.peak_bytes + beside, always + end)

    def _forward(self, part: Part, given: Sequence[Given | None], kernels: Kernels) -> None:
        self._layouts = part.layouts
        self._held = {one.storage: one.bytes for one in given if one is not None}
        for held, size in self._held.items():
            self._saved[PARAMETER + held] = Given(held, size, True)
        results = len(kernels.returned) if self._results is None else self._results
        for one in kernels.returned[:results]:
            if one is not None:
                self._held[one.storage] = one.bytes
        for place, (name, one) in enumerate(zip(part.outputs, kernels.returned, strict=True)):
            if name is not None and one is not None:
                lasts = one.storage in self._held
                if (strides := kernels.strides[place]) is not None:
                    self._strides[name] = strides
                self._saved[name] = Given(one.storage, one.bytes, lasts)


def cut(joint: Joint, module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """As Inductor does it."""
    return min_cut_rematerialization_partition(
        module, joint.inputs, "inductor", num_fwd_outputs=joint.results, **joint.options
    )


def _save_before_writes(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Have inputs that forward writes be saved as they were before, which is what backward wants.

    PyTorch's partitioner saves the inputs themselves, such as a codebook that forward moves.
    """
    writes = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    saved = [one for one in returned(forward)[results:] if isinstance(one, fx.Node)]
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for write in writes:
        source = write.args[0]
        if source.op != "placeholder" or not any(_share_memory(one, source) for one in saved):
            continue
        *_, last = forward.graph.find_nodes(op="placeholder")
        with forward.graph.inserting_after(last):
            before = forward.graph.call_function(torch.ops.aten.clone.default, (source,))
        before.meta = {**source.meta, "val": source.meta["val"].clone()}
        for user in {*source.users} - {before, write}:
            user.replace_input_with(source, before)
        if source in saved:
            place = placed(before.name, source, given[source.name])
            given[source.name].replace_all_uses_with(place)
            backward.graph.erase_node(given[source.name])
    forward.recompile()
    backward.recompile()


def _share_memory(one: fx.Node, other: fx.Node) -> bool:
    of, held = one.meta.get("val"), other.meta["val"]
    return isinstance(of, torch.Tensor) and _storage(of) == _storage(held)


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def placed(name: str, like: fx.Node, after: fx.Node) -> fx.Node:
    """A new input of the graph of `after`."""
    with after.graph.inserting_after(after):
        place = after.graph.placeholder(name)
    place.meta = dict(like.meta)
    return place


def names_again(joint: Joint, replays: Sequence[Again]) -> frozenset[str]:
    """Nodes of forward that run again, with the views of what they make."""
    if not replays:
        return frozenset()
    forward, _ = joint.parts()
    program_of(forward)
    nodes = [node for node in forward.graph.nodes if node.op == "call_function"]
    run = {name for one in replays for name in one.operators}
    made = {index for node in nodes if node.name in run for index in facts_of(node).makes}
    return frozenset(n.name for n in nodes if {*facts_of(n).makes, facts_of(n).shows} & made)


def tag(graph: fx.Graph, names: frozenset[str]) -> None:
    """Have PyTorch's partitioner run these nodes again in the backward pass."""
    for node in graph.nodes:
        if node.name in names:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)


def _layout(value: Any) -> Any:
    """Strides, dtype and bytes."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.stride(), value.dtype, value.numel() * value.element_size()
