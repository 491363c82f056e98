"""A region in fused kernels: PyTorch Inductor compiles it as usual (`compile_fx`), but memplan
chooses what forward saves for backward, and the order of the kernels."""

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
from memplan.runtime.graph.compile import Budget
from memplan.runtime.graph.inductor import CompiledKernels, compiled, uncached
from memplan.runtime.graph.inductor_buffers import InputBuffer
from memplan.runtime.graph.joint import Joint, copied, returned
from memplan.runtime.graph.meta_peak import storage_bytes
from memplan.runtime.graph.program import facts_of, program_of
from memplan.runtime.graph.recompute import within_budget
from memplan.runtime.graph.recompute_problem import RecomputeProblem, problem_without_saves
from memplan.runtime.graph.rematerialize import NodeReplay
from memplan.runtime.graph.workspaces import is_symbolic
from memplan.types.errors import InfeasibleError, UsageError

log = logging.getLogger("memplan")


PARAMETER = "parameter_"
"""Prefix of the names of backward's inputs that are forward's inputs themselves. What forward saves
of an input may be a copy with other strides."""


def fused_region(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    budget: Budget,
    deadline_seconds: float,
) -> Callable[..., Any]:
    """Compile a graph as `torch.compile` does, within a budget.

    PyTorch's partitioner chooses what forward saves for backward. Where that exceeds the budget,
    the partitioner is told what to recompute. The peak that is compared with the budget is that of
    the generated code. Raises InfeasibleError where the budget cannot be met, and UsageError for a
    budget of a graph with unknown sizes or operators.
    """
    parts = FusedParts(budget, deadline_seconds)
    with uncached(), config.patch(custom_partitioner_fn=parts):
        run: Any = compile_fx(module, inputs, inner_compile=parts.compile)
    code: Callable[..., Any] = run
    return code


class FusedParts(CustomPartitionerFn):
    """Forward and backward of one graph. `compile_fx` first calls it to split the graph, then to
    compile each part (`compile`)."""

    def __init__(self, budget: Budget, deadline_seconds: float) -> None:
        self._budget = budget
        self._seconds = deadline_seconds
        self._results: int | None = None
        self._always: tuple[Sequence[int], int] = (), 0
        """`CallerMemory`'s bytes that are there all the time, and when backward has ended."""
        self._memory = CallerMemory(0)
        self.recomputed: frozenset[str] = frozenset()
        """Names of nodes that the budget makes run again, beside those that PyTorch chooses."""
        self.promised_bytes = 0
        """The highest peak of the parts that were compiled so far."""
        self.high_bytes = 0
        """The same with the largest workspaces that libraries may choose."""

    def uuid(self) -> None:
        """None: PyTorch does not cache graphs with this partitioner."""

    def __deepcopy__(self, _memo: Any) -> FusedParts:
        """PyTorch copies its settings, of which this is one."""
        return self

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._results = results = kwargs.pop("num_fwd_outputs")
        kwargs.pop("compiler", None)  # other partitioners do not know it
        joint = Joint(gm, joint_inputs, results, kwargs)
        if self._budget is None:
            return self._split(joint, gm)
        chosen = self._choose(joint)
        self.recomputed = chosen.recomputed
        return chosen.parts

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Replaces `compile_fx_inner`."""
        backward = bool(options.get("is_backward"))
        if not backward:
            results = None if options.get("is_inference") else self._results
            self._memory = self._caller_memory(results)
        run, kernels, peak = self._compiled(module, inputs, self._memory, **options)
        if kernels is not None:
            self._promise(peak, kernels)
        return run

    def _compiled(
        self, module: fx.GraphModule, inputs: Sequence[Any], memory: CallerMemory, **options: Any
    ) -> tuple[Any, CompiledKernels | None, int]:
        """A part's code, what is known of it, and its peak with all that the caller holds."""
        backward = bool(options.get("is_backward"))
        part = PartInterface(module, inputs)
        buffers = memory.input_buffers(part, backward=backward)
        run, kernels = compiled(
            module,
            inputs,
            buffers,
            resident=memory.resident(buffers),
            deadline_seconds=self._seconds,
            **options,
        )
        if kernels is None:
            self._refuse("it has sizes that are not known")
            return run, None, 0
        return run, kernels, memory.peak(part, buffers, kernels, backward=backward)

    def _promise(self, peak: int, kernels: CompiledKernels) -> None:
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

    def _caller_memory(self, results: int | None) -> CallerMemory:
        """What the caller holds when forward begins."""
        return CallerMemory(results, *self._always)

    def _finish_backward(self, backward: fx.GraphModule, memory: CallerMemory) -> None:
        """Hook for subclasses: change backward once forward's code is known."""

    def _split(self, joint: Joint, module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = split(joint, module)
        _save_before_writes(forward, backward, joint.results)
        return forward, backward

    def _choose(self, joint: Joint) -> _Attempt:
        def attempt(replays: tuple[NodeReplay, ...]) -> _Attempt:
            module = copied(joint.module)
            names = recomputed_names(joint, replays)
            tag(module.graph, names)
            parts = self._split(joint, module)
            return _Attempt(self._peak_of(parts), parts, names)

        def plain() -> RecomputeProblem:
            try:
                return problem_without_saves(joint)
            except ValueError as error:
                self._refuse(str(error))
                raise

        return within_budget(plain, attempt, self._budget)

    def _peak_of(self, parts: tuple[fx.GraphModule, fx.GraphModule]) -> int:
        """The peak of forward and backward, without generating code."""
        memory, most = self._caller_memory(self._results), 0
        for module, backward in zip(parts, (False, True), strict=True):
            mine = copied(module)
            if backward:
                self._finish_backward(mine, memory)
            nodes = list(mine.graph.nodes)
            inputs = memory.inputs_as_saved(mine)
            seen = range(0 if backward else self._results or 0)
            nodes[-1].meta["user_visible_output_idxs"] = [
                place for place in seen if isinstance(nodes[-1].args[0][place], fx.Node)
            ]
            options = {"dry_run": True, "is_backward": backward}
            _, kernels, peak = self._compiled(mine, inputs, memory, **options)
            if kernels is None:
                return 0
            most = max(most, peak)
        return most

    def _refuse(self, why: str) -> None:
        """Raises UsageError where there is a budget to keep."""
        if self._budget is not None:
            raise UsageError(f"no budget for this graph: {why}", "no budget")


@dataclass(frozen=True, eq=False)
class _Attempt:
    peak_bytes: int
    parts: tuple[fx.GraphModule, fx.GraphModule]
    recomputed: frozenset[str]


class PartInterface:
    """Inputs and outputs of a part, before Inductor changes its graph."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        nodes = list(module.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        self.inputs = [
            InputBuffer(str(node.target), 0 if is_symbolic(one) else storage_bytes(one), True)
            if isinstance(one, torch.Tensor)
            else None
            for one, node in zip(inputs, places, strict=True)
        ]
        self.layouts = [_layout(one) for one in inputs]
        outputs = [one if isinstance(one, fx.Node) else None for one in nodes[-1].args[0]]
        self.outputs = [None if one is None else one.name for one in outputs]
        self.returned = [None if one is None else _layout(one.meta.get("val")) for one in outputs]


class CallerMemory:
    """Memory that is held beside the code of forward, and then beside that of backward."""

    def __init__(
        self, results: int | None, base: Sequence[int] = (), step_scratch_bytes: int = 0
    ) -> None:
        self._results = results
        """Number of forward's outputs that go to the caller; None for all."""
        self._base = base
        """Blocks, in bytes, that are there all the time."""
        self._workspace_bytes = 0
        """Bytes that libraries keep once they are used."""
        self._step_scratch_bytes = step_scratch_bytes
        """Bytes that are allocated and freed when backward has ended."""
        self._saved: dict[str, InputBuffer] = {}
        """Buffers of saved values, by name."""
        self._held: dict[str, int] = {}
        """Bytes of storages that the caller holds, by name."""
        self._layouts: list[Any] = []
        """Layouts of forward's inputs."""
        self._strides: dict[str, tuple[int, ...]] = {}
        """Strides that forward's code gives to outputs, by name."""

    def input_buffers(self, part: PartInterface, *, backward: bool) -> list[InputBuffer | None]:
        """The buffer of each input of a part; None for what is no tensor."""
        if not backward:
            return part.inputs
        return [None if one is None else self._saved.get(one.storage, one) for one in part.inputs]

    def storage_of(self, name: str) -> str | None:
        """The name of the storage of a saved value; None for a name that is not saved."""
        found = self._saved.get(name)
        return None if found is None else found.storage

    def resident(self, buffers: Sequence[InputBuffer | None]) -> list[int]:
        """Blocks, in bytes, that are held beside a part with these inputs while it runs."""
        lasting = {one.storage for one in buffers if one is not None and one.outlives_graph}
        held = [size for name, size in self._held.items() if name not in lasting]
        return [*self._base, *held]

    def inputs_as_saved(self, module: fx.GraphModule) -> list[Any]:
        """Fake tensors for a part's inputs, with the strides that forward's code gives them."""
        found = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                value, strides = node.meta["val"], self._strides.get(node.name)
                if strides is not None and value.stride() != strides:
                    value = value.as_strided(value.size(), strides)
                found.append(value)
        return found

    def peak(
        self,
        part: PartInterface,
        buffers: Sequence[InputBuffer | None],
        kernels: CompiledKernels,
        *,
        backward: bool,
    ) -> int:
        """The peak of a part with all that the caller holds, in bytes. Forward comes first."""
        self._workspace_bytes = max(self._workspace_bytes, kernels.workspace_bytes)
        always = sum(self._base) + self._workspace_bytes
        if not backward:
            self._forward(part, buffers, kernels)
            return always + kernels.peak_bytes
        lasting = {one.storage for one in buffers if one is not None and one.outlives_graph}
        resident = sum(self.resident(buffers))
        gradients = {
            one.storage: one.bytes
            for one in kernels.returned
            if one is not None and one.storage not in lasting
        }
        # Autograd copies gradients whose layout differs from their input's, one at a time.
        copies = [
            of[-1]
            for of, into in zip(part.returned, self._layouts, strict=False)
            if of is not None and into is not None and of[:-1] != into[:-1]
        ]
        held = {
            **self._held,
            **{one.storage: one.bytes for one in buffers if one and one.outlives_graph},
        }
        end: int = (
            sum(held.values()) + sum(gradients.values()) + max([*copies, self._step_scratch_bytes])
        )
        return max(self._workspace_bytes + kernels.peak_bytes + resident, always + end)

    def _forward(
        self, part: PartInterface, buffers: Sequence[InputBuffer | None], kernels: CompiledKernels
    ) -> None:
        self._layouts = part.layouts
        self._held = {one.storage: one.bytes for one in buffers if one is not None}
        for held, size in self._held.items():
            self._saved[PARAMETER + held] = InputBuffer(held, size, True)
        results = len(kernels.returned) if self._results is None else self._results
        for one in kernels.returned[:results]:
            if one is not None:
                self._held[one.storage] = one.bytes
        for place, (name, one) in enumerate(zip(part.outputs, kernels.returned, strict=True)):
            if name is not None and one is not None:
                outlives_graph = one.storage in self._held
                if (strides := kernels.strides[place]) is not None:
                    self._strides[name] = strides
                self._saved[name] = InputBuffer(one.storage, one.bytes, outlives_graph)


def split(joint: Joint, module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph as Inductor does."""
    return min_cut_rematerialization_partition(
        module, joint.inputs, "inductor", num_fwd_outputs=joint.results, **joint.options
    )


def _save_before_writes(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Save a copy of each input that forward writes, as it is before the write.

    Backward needs that value, but PyTorch's partitioner saves the input itself, for example a
    codebook that forward moves.
    """
    writes = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    saved = [one for one in returned(forward)[results:] if isinstance(one, fx.Node)]
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
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
            place = add_placeholder(before.name, source, inputs[source.name])
            inputs[source.name].replace_all_uses_with(place)
            backward.graph.erase_node(inputs[source.name])
    forward.recompile()
    backward.recompile()


def _share_memory(one: fx.Node, other: fx.Node) -> bool:
    of, held = one.meta.get("val"), other.meta["val"]
    return isinstance(of, torch.Tensor) and _storage(of) == _storage(held)


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def add_placeholder(name: str, like: fx.Node, after: fx.Node) -> fx.Node:
    """Add an input behind the input `after`."""
    with after.graph.inserting_after(after):
        place = after.graph.placeholder(name)
    place.meta = dict(like.meta)
    return place


def recomputed_names(joint: Joint, replays: Sequence[NodeReplay]) -> frozenset[str]:
    """Names of the forward nodes that run again, and of the views of their results."""
    if not replays:
        return frozenset()
    forward, _ = joint.parts
    program_of(forward)
    nodes = [node for node in forward.graph.nodes if node.op == "call_function"]
    run = {name for one in replays for name in one.operators}
    made = {index for node in nodes if node.name in run for index in facts_of(node).makes}
    return frozenset(n.name for n in nodes if {*facts_of(n).makes, facts_of(n).storage} & made)


def tag(graph: fx.Graph, names: frozenset[str]) -> None:
    """Tell PyTorch's partitioner to run these nodes again in backward."""
    for node in graph.nodes:
        if node.name in names:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)


def _layout(value: Any) -> Any:
    """Strides, dtype and bytes."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.stride(), value.dtype, value.numel() * value.element_size()
