"""Captures a whole step with PyTorch's compiler, and compiles the graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import fx
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.runtime.graph.compiled_graph import CompiledGraph, OrderedStep
from memplan.runtime.graph.eager_kernels import eager_kernels
from memplan.runtime.graph.extra_guards import ExtraGuards, refusal
from memplan.runtime.graph.in_place import in_place
from memplan.runtime.graph.joint import (
    Joint,
    UncapturedError,
    changed_inputs,
    copied,
    forward_alone,
    is_tangent,
    returned,
    run_once,
    whole_step,
)
from memplan.runtime.graph.leaf_hooks import LeafHooks
from memplan.runtime.graph.operator_graph import operator_graph
from memplan.runtime.graph.ordering import choose_order
from memplan.runtime.graph.other_bits import casts_once, difference
from memplan.runtime.graph.program import Program, program_of
from memplan.runtime.graph.recompute import within_budget
from memplan.runtime.graph.recompute_problem import RecomputeProblem, recompute_problem
from memplan.runtime.graph.rematerialize import NodeReplay
from memplan.runtime.graph.setup import Setup
from memplan.runtime.graph.updates import UpdatePlan
from memplan.runtime.graph.user_calls import USER_CALLS, has_foreign_gradients
from memplan.types.errors import UsageError

if TYPE_CHECKING:
    from memplan.runtime.graph.fused_step import FusedStepParts

    RunnableGraph: TypeAlias = CompiledGraph | FusedStepParts
    """A compiled step for one set of shapes."""


class StepCapture:
    """A loss function, with the graphs that PyTorch captures of it."""

    def __init__(self, loss_fn: Callable[..., Any], setup: Setup) -> None:
        self._loss_fn = loss_fn
        self._setup = setup
        self._updates = setup.updates
        self.programs: list[RunnableGraph] = []
        """One for each set of shapes or values."""
        self.ran: RunnableGraph | None = None
        """The graph that began to run last."""
        self.guards = ExtraGuards()
        self._updates_in_graph: bool | None = None
        """Whether the current graphs update parameters; None where there are no graphs."""
        self._needs: dict[int, tuple[int, int]] = {}
        """`Updates.memory_needs` when the graphs were captured."""
        self._graph: Callable[..., Any] = self._captured()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, backward and updates. Returns what the loss function returns."""
        return self._graph(*args, **kwargs)

    def is_out_of_date(self, *, updates_in_graph: bool) -> bool:
        """Whether something has changed that the graphs depend on and no guard of PyTorch sees."""
        known = self._updates_in_graph in (None, updates_in_graph)
        return not known or self._needs_more_memory() or self.guards.changed()

    def _needs_more_memory(self) -> bool:
        """Whether the optimizers need more memory than promised, as with momentum switched on."""
        if self._updates_in_graph is None:
            return False
        needs = self._updates.memory_needs(self._needs)
        pairs = ((now, self._needs.get(key, (0, 0))) for key, now in needs.items())
        return any(now[0] > before[0] or now[1] > before[1] for now, before in pairs)

    def begin_anew(self) -> None:
        """Forget all graphs; the next call captures anew."""
        self.forget()
        self._graph = self._captured()

    def forget(self) -> None:
        """Release the compiled graphs, which Dynamo stores with the function's code."""
        self.programs = []
        self.ran = self._updates_in_graph = None
        reset_code(self._code)

    def _captured(self) -> Callable[..., Any]:
        """A function that PyTorch captures when it is called first."""
        self.guards = ExtraGuards()
        captured = _with_own_code(self._loss_fn)
        self._code = captured.__code__
        weakref.finalize(self, reset_code, self._code).atexit = False
        owner = weakref.ref(self)  # Dynamo never releases a backend

        def backend(*given: Any, **more: Any) -> Callable[..., Any]:
            compiled: Callable[..., Any] = _alive(owner)._backend(*given, **more)
            return compiled

        seen: Any = {"guard_filter_fn": self.guards.record}
        graph: Callable[..., Any] = torch.compile(
            captured,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            options=seen,
        )
        return graph

    def _backend(self, module: Any, primals: list[Any], **_options: Any) -> Callable[..., Any]:
        if why := USER_CALLS.end() or refusal(module) or wraps_several_tensors(primals):
            raise UncapturedError(why)
        used = self._updates.objects(in_graph=self._setup.updates_in_graph())
        if why := _side_effect_refusal(used):
            raise UncapturedError(why)
        with self.guards.compiling():
            try:
                return self._compiled(module, primals)
            finally:
                USER_CALLS.end()

    def _compiled(self, module: Any, primals: list[Any]) -> Callable[..., Any]:
        if why := self._untrained_refusal(primals):
            raise UncapturedError(why)

        self._updates_in_graph = self._setup.updates_in_graph()
        self._needs = self._updates.memory_needs({})
        written: set[int] = set()
        once = casts_once(module)

        def refuse(joint: fx.GraphModule, results: int) -> None:
            if why := USER_CALLS.end():
                raise UncapturedError(why)
            inputs = joint.graph.find_nodes(op="placeholder")
            if sum(not is_tangent(one) for one in inputs) != len(primals):
                raise UncapturedError(
                    "an operator with effects, which PyTorch keeps in their order, or inputs that "
                    "share memory, which is written"
                )
            written.update(_written(joint))
            writes = results > _results(module) or bool(written)
            if why := difference(module, joint.graph, primals, casts_once=once, writes=writes):
                raise UncapturedError(why)

        if has_foreign_gradients(module):
            USER_CALLS.begin()
        if self._setup.options.codegen == "inductor":
            return self._fused(module, primals, refuse, written)
        joints: list[Joint] = []

        def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
            refuse(joint, num_fwd_outputs)
            joints.append(Joint(copied(joint), inputs, num_fwd_outputs, more))
            forward, backward = map(copied, joints[0].parts)
            gradients = len(returned(backward))
            return forward_alone(forward, backward, num_fwd_outputs, gradients)

        def forward(_module: Any, _inputs: Any) -> Callable[[list[Any]], list[Any]]:
            if not joints:
                _raise_no_gradient()
            owner = weakref.ref(self)

            def make(primals: list[Any]) -> OrderedStep:
                capture = _alive(owner)
                with capture.guards.compiling():  # also in a later call, for a rebuild
                    made: OrderedStep = capture._make(joints[0], primals)
                return made

            plan = UpdatePlan(self._updates)
            made = CompiledGraph(make, make(primals), plan, joints[0])
            return self._boxed(made, written)

        compile_parts: Any = aot_module_simplified
        with eager_kernels():
            compiled: Callable[..., Any] = compile_parts(
                module,
                primals,
                fw_compiler=forward,
                bw_compiler=lambda *_: run_once,
                partition_fn=partition,
            )
        return compiled

    def _fused(
        self, module: Any, primals: list[Any], refuse: Any, written: set[int]
    ) -> Callable[..., Any]:
        # Its import takes seconds.
        from memplan.runtime.graph.fused_step import FusedStepParts, fused_step

        parts = FusedStepParts(
            primals,
            self._setup,
            refuse=refuse,
            wrap=lambda made: self._boxed(made, written),
            without_gradient=_raise_no_gradient,
        )
        compiled: Callable[..., Any] = fused_step(module, primals, parts)
        return compiled

    def _boxed(self, made: RunnableGraph, written: set[int]) -> Callable[[list[Any]], list[Any]]:
        """The function for PyTorch. `written`: places of inputs that the loss function changes."""
        self.programs.append(made)
        guards, owner = self.guards, weakref.ref(self)

        def boxed(args: list[Any]) -> list[Any]:
            if guards.refusal:
                raise UncapturedError(guards.refusal)
            capture = _alive(owner)
            if why := capture._untrained_refusal(args) or capture._shared_memory(args, written):
                raise UncapturedError(why)
            capture.ran = made
            return made.run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def _make(self, joint: Joint, primals: list[Any]) -> OrderedStep:
        options = self._setup.options

        def program(replays: tuple[NodeReplay, ...]) -> Program:
            module = whole_step(joint, replays, self._setup, primals)
            return program_of(module, self._setup.resident_blocks())

        def plain() -> RecomputeProblem:
            return recompute_problem(operator_graph(program(())))

        def attempt(replays: tuple[NodeReplay, ...]) -> OrderedStep:
            graph = operator_graph(in_place(program(replays)))
            ordering = choose_order(
                graph,
                search=options.order,
                deadline_seconds=options.deadline_seconds,
                seed=options.seed,
            )
            recomputed = sum(len(one.operators) for one in replays)
            return OrderedStep(graph.program, ordering, recomputed)

        return within_budget(plain, attempt, options.budget)

    def _untrained_refusal(self, inputs: Iterable[Any]) -> str:
        """Why gradients of inputs that no optimizer trains cannot be stored; else empty."""
        return LeafHooks().refusal(one for one in inputs if not self._updates.trains(one))

    def _shared_memory(self, inputs: Sequence[Any], written: set[int]) -> str:
        """Why inputs cannot be passed to a graph, which assumes that they do not share memory that
        is written; empty where they can."""
        spans = []
        others, changed = set(), set()
        """Memory of inputs that no optimizer trains; of those that are written."""
        for place, one in enumerate(inputs):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.numel():
                start = one.data_ptr()
                trained = self._updates.trains(one)
                spans.append((start, start + _extent(one), trained or place in written))
                if not trained:
                    others.add(one.untyped_storage().data_ptr())
                if place in written:
                    changed.add(one.untyped_storage().data_ptr())
        for one in self._updates.written() if others else ():
            if one.layout is torch.strided and one.untyped_storage().data_ptr() in others:
                return "the loss depends on optimizer state or gradients, which the step changes"
        for one in self._updates.options() if changed else ():
            if one.untyped_storage().data_ptr() in changed:
                return "the loss changes a tensor among its optimizer's options, such as lr"
        spans.sort()
        end, held = 0, False
        for start, stop, writes in spans:
            if start < end and (writes or held):
                return "parameters or inputs that share memory, which is written"
            held = writes if start >= end else held or writes
            end = max(end, stop)
        return ""


def _alive(owner: weakref.ref[Any]) -> Any:
    found = owner()
    assert found is not None
    return found


def _with_own_code(loss_fn: Callable[..., Any]) -> FunctionType:
    """The function with a code object of its own, because PyTorch counts captures by code object.

    It raises where PyTorch does not capture it: the step runs the function plainly then, which must
    not happen twice.
    """

    def captured(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise UncapturedError("PyTorch does not capture it here")
        return loss_fn(*args, **kwargs)

    assert isinstance(captured, FunctionType)
    captured.__code__ = captured.__code__.replace()
    return captured


def _side_effect_refusal(used: Container[int]) -> str:
    """Why the traced function's side effects, for which Dynamo lets the graph end first, would come
    too late; empty where they do not. `used`: ids of objects that the graph's updates use."""
    effects = InstructionTranslator.current_tx().output.side_effects
    if effects.tensor_hooks:
        return "the loss puts a hook on a tensor that is there before the call"
    changed = (key for key, one in effects.id_to_variable.items() if effects.is_modified(one))
    if any(key in used for key in changed):
        return "the loss changes its optimizer or a gradient, which the step uses"
    return ""


def _results(module: fx.GraphModule) -> int:
    """Number of values that a function returns. A traced graph returns changed inputs, too."""
    return len(pytree.tree_leaves(returned(module)))


def _extent(one: torch.Tensor) -> int:
    """Bytes from the start of a tensor's first element to the end of its last one."""
    if one.is_contiguous():
        return one.nbytes
    last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
    return (last + 1) * one.element_size()


def _written(joint: fx.GraphModule) -> set[int]:
    """Places of inputs that a joint graph or its caller changes."""
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {*changed_inputs(joint), *(node.args[0] for node in copies)}
    places = joint.graph.find_nodes(op="placeholder")
    return {place for place, node in enumerate(places) if node in written}


def _raise_no_gradient() -> NoReturn:
    """Have the step run plainly, which raises the right error: the loss may be an input."""
    raise UncapturedError("no operator of the graph has a gradient")


def no_gradient() -> UsageError:
    """The error for a loss that cannot be differentiated."""
    for mode, entered in (
        ("inference_mode", torch.is_inference_mode_enabled()),
        ("no_grad", not torch.is_grad_enabled()),
    ):
        if entered:
            return UsageError(f"the step is called under torch.{mode}()", f"no torch.{mode}()")
    return UsageError(
        "the loss depends on nothing that requires a gradient",
        "a model with parameters that train, and its loss itself: not detached, no item()",
    )


def wraps_several_tensors(inputs: Iterable[Any]) -> str:
    """Why inputs that wrap other tensors (DTensor) cannot be passed to a graph; else empty."""
    for one in inputs:
        if isinstance(one, torch.Tensor) and is_traceable_wrapper_subclass(one):
            return f"a {type(one).__name__} among inputs and parameters; compile the model instead"
    return ""
