"""How PyTorch's compiler captures a whole step, and what it is given to run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NoReturn, Protocol

import torch
from torch import fx
from torch._C._dynamo.eval_frame import reset_code
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.runtime.graph.again import Again
from memplan.runtime.graph.compile import Options
from memplan.runtime.graph.dependencies import Operators, operators
from memplan.runtime.graph.eager_kernels import eager_kernels, every_draw
from memplan.runtime.graph.guarded import Guarded, refusal
from memplan.runtime.graph.in_place import in_place
from memplan.runtime.graph.joint import (
    Joint,
    UncapturedError,
    changed_inputs,
    copied,
    forward_alone,
    is_tangent,
    returned,
    whole_step,
)
from memplan.runtime.graph.leaves import Leaves
from memplan.runtime.graph.ordering import choose_order
from memplan.runtime.graph.passes import Pass, pass_of
from memplan.runtime.graph.program import Program, program_of
from memplan.runtime.graph.recompute import within_budget
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.step_graph import Compiled, Made
from memplan.runtime.graph.updates import Updates
from memplan.runtime.graph.watch import WATCH, gradients_of_others
from memplan.types.errors import UsageError


class Runs(Protocol):
    """The code of one set of shapes."""

    def run(self, primals: list[Any]) -> list[Any]: ...

    def written_until(self, error: BaseException) -> list[str]: ...

    def report(self) -> ProgramReport: ...


class LookedError(Exception):
    def __init__(self, found: Operators) -> None:
        super().__init__()
        self.found = found


class StepCapture:
    """A loss function as PyTorch captures it, and the graphs that came of it."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        updates: Updates,
        scaler: torch.amp.GradScaler | None,
        options: Options,
    ) -> None:
        self._loss_fn = loss_fn
        self._updates = updates
        self._scaler = scaler
        self._options = options
        self.programs: list[Runs] = []
        """One for each set of shapes or values."""
        self.ran: Runs | None = None
        """What began to run last."""
        self.only_looks = False
        """Whether a graph is wanted and no run: it comes as a LookedError."""
        self.guarded = Guarded()
        self._updates_in_graph: bool | None = None
        """Of the graphs that are there; None where none is."""
        self._needs: dict[int, tuple[int, int]] = {}
        """Of the optimizers, as these graphs promise it."""
        self._graph: Callable[..., Any] = self._captured()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the loss function returns, forward, backward and updates done."""
        return self._graph(*args, **kwargs)

    def is_out_of_date(self, *, updates_in_graph: bool) -> bool:
        """Whether what was captured rests on something that has changed and that no guard sees."""
        known = self._updates_in_graph in (None, updates_in_graph)
        return not known or self._need_more() or self.guarded.changed()

    def _need_more(self) -> bool:
        """Whether the optimizers ask for more bytes than was promised: momentum was switched on."""
        if self._updates_in_graph is None:
            return False
        needs = self._updates.needs(self._needs)
        pairs = ((now, self._needs.get(key, (0, 0))) for key, now in needs.items())
        return any(now[0] > before[0] or now[1] > before[1] for now, before in pairs)

    def begin_anew(self) -> None:
        """What the next call runs is captured then."""
        self.forget()
        self._graph = self._captured()

    def forget(self) -> None:
        """Let go of what was compiled; Dynamo keeps it with a function's code."""
        self.programs = []
        self.ran = self._updates_in_graph = None
        reset_code(self._code)

    def can_update_in_graph(self) -> bool:
        return (
            self._scaler is None
            and self._options.clip_grad_norm is None
            and self._updates.each_by_itself()
        )

    def _captured(self) -> Callable[..., Any]:
        """A function that PyTorch captures anew."""
        self.guarded = Guarded()
        captured = _own_code(self._loss_fn)
        self._code = captured.__code__
        weakref.finalize(self, reset_code, self._code).atexit = False
        owner = weakref.ref(self)  # Dynamo keeps backends for ever

        def backend(*given: Any, **more: Any) -> Callable[..., Any]:
            compiled: Callable[..., Any] = _there(owner)._backend(*given, **more)
            return compiled

        seen: Any = {"guard_filter_fn": self.guarded.see}
        graph: Callable[..., Any] = torch.compile(
            captured,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            options=seen,
        )
        return graph

    def _backend(self, module: Any, primals: list[Any], **_options: Any) -> Callable[..., Any]:
        if why := WATCH.end() or refusal(module) or of_several(primals):
            raise UncapturedError(why)
        with self.guarded.compiling():
            try:
                return self._compiled(module, primals)
            finally:
                WATCH.end()

    def _compiled(self, module: Any, primals: list[Any]) -> Callable[..., Any]:
        if why := self._not_trained(primals):
            raise UncapturedError(why)

        self._updates_in_graph = self.can_update_in_graph()
        self._needs = self._updates.needs({})
        written: set[int] = set()

        def refuse(joint: fx.GraphModule, results: int) -> None:
            if why := WATCH.end():
                raise UncapturedError(why)
            inputs = joint.graph.find_nodes(op="placeholder")
            if sum(not is_tangent(one) for one in inputs) != len(primals):
                raise UncapturedError(
                    "an operator with effects, which PyTorch keeps in their order, or inputs that "
                    "share memory, which is written"
                )
            if _lies_in_other_rows(joint):
                raise UncapturedError(
                    "a recurrent cell on the CPU whose width is no multiple of 64: PyTorch's "
                    "capture lays out its gates in another way, which changes their last bits"
                )
            written.update(_written(joint))
            if _checkpoints(joint) and (results > _results(module) or written):
                raise UncapturedError(
                    "a checkpoint around what changes a buffer: run twice, it changes it twice"
                )

        if gradients_of_others(module):
            WATCH.begin()
        if self._options.codegen == "inductor" and not self.only_looks:
            return self._fused(module, primals, refuse, written)
        joints: list[Joint] = []

        def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
            refuse(joint, num_fwd_outputs)
            joints.append(Joint(copied(joint), inputs, num_fwd_outputs, more))
            forward, backward = map(copied, joints[0].parts())
            gradients = len(returned(backward))
            return forward_alone(forward, backward, num_fwd_outputs, gradients)

        def forward(_module: Any, _inputs: Any) -> Callable[[list[Any]], list[Any]]:
            if not joints:
                _without_gradient()
            owner = weakref.ref(self)

            def make(primals: list[Any]) -> Made:
                capture = _there(owner)
                with capture.guarded.compiling():  # also in a later call, for another arithmetic
                    made: Made = capture._make(joints[0], primals)
                return made

            made = Compiled(make, make(primals), self._updates, joints[0].results)
            return self._boxed(made, written)

        compile_parts: Any = aot_module_simplified
        with eager_kernels(), every_draw():
            compiled: Callable[..., Any] = compile_parts(
                module, primals, fw_compiler=forward, bw_compiler=_never, partition_fn=partition
            )
        return compiled

    def _fused(
        self, module: Any, primals: list[Any], refuse: Any, written: set[int]
    ) -> Callable[..., Any]:
        # Takes seconds to import.
        from memplan.runtime.graph.fused_step import StepParts, fused_step

        parts = StepParts(
            primals,
            self._updates,
            self._scaler,
            keep=self._keeps(),
            base=self._held(),
            behind_bytes=0 if self.can_update_in_graph() else self._updates.behind_bytes(),
            budget=self._options.budget,
            deadline_seconds=self._options.deadline_seconds,
            refuse=refuse,
            wrap=lambda made: self._boxed(made, written),
            without_gradient=_without_gradient,
        )
        compiled: Callable[..., Any] = fused_step(module, primals, parts)
        return compiled

    def _boxed(self, made: Runs, written: set[int]) -> Callable[[list[Any]], list[Any]]:
        """As PyTorch calls it. `written`: places of inputs that the loss function changes."""
        self.programs.append(made)
        guarded, owner = self.guarded, weakref.ref(self)

        def boxed(args: list[Any]) -> list[Any]:
            if guarded.refusal:
                raise UncapturedError(guarded.refusal)
            capture = _there(owner)
            if why := capture._not_trained(args) or capture._shared(args, written):
                raise UncapturedError(why)
            capture.ran = made
            return made.run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def _make(self, joint: Joint, primals: list[Any]) -> Made:
        options = self._options

        def program(replays: tuple[Again, ...]) -> Program:
            module = whole_step(
                joint,
                replays,
                self._updates,
                self._scaler,
                primals,
                keep=self._keeps(),
                behind=not self.can_update_in_graph(),
            )
            return program_of(module, self._held())

        def plain() -> Pass:
            graph = operators(program(()))
            self._updates.take_classes()
            return pass_of(graph)

        def attempt(replays: tuple[Again, ...]) -> Made:
            graph = operators(in_place(program(replays)))
            classes, first_only = self._updates.take_classes()
            ordering = choose_order(
                graph,
                search=options.order,
                deadline_seconds=options.deadline_seconds,
                seed=options.seed,
            )
            recomputed = sum(len(one.operators) for one in replays)
            updated = {id(one) for of in classes for one in of.parameters}
            known = [one if id(one) in updated else None for one in primals]
            return Made(graph.program, ordering, recomputed, classes, first_only, known)

        if self.only_looks:
            raise LookedError(operators(in_place(program(()))))
        return within_budget(plain, attempt, options.budget)

    def _not_trained(self, inputs: Iterable[Any]) -> str:
        """What would happen to gradients that no optimizer wants; empty if they are kept."""
        return Leaves().refusal(one for one in inputs if not self._updates.trains(one))

    def _shared(self, inputs: Sequence[Any], written: set[int]) -> str:
        """What of the inputs lies in memory that is another's, too, and is written; empty if
        nothing. To a graph its inputs are apart."""
        spans = []
        for place, one in enumerate(inputs):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.numel():
                start = one.data_ptr()
                writes = place in written or self._updates.trains(one)
                spans.append((start, start + _extent(one), writes))
        spans.sort()
        end, held = 0, False
        for start, stop, writes in spans:
            if start < end and (writes or held):
                return "parameters or inputs that share memory, which is written"
            held = writes if start >= end else held or writes
            end = max(end, stop)
        return ""

    def _keeps(self) -> bool:
        if self._options.accumulate > 1:
            return False  # they are added to those that are there
        return self._options.keep_gradients or not self.can_update_in_graph()

    def _held(self) -> list[int]:
        """Optimizer state, and gradients of earlier calls."""
        parameters = {id(one): one for one in self._updates.parameters()}.values()
        state = [self._updates.state_bytes(one)[0] for one in parameters]
        gradients = [one.numel() * one.element_size() for one in parameters]
        return [*state, *(gradients if self._options.accumulate > 1 else [])]


def _there(owner: weakref.ref[Any]) -> Any:
    found = owner()
    assert found is not None
    return found


def _own_code(loss_fn: Callable[..., Any]) -> FunctionType:
    """The function, with code of its own: PyTorch counts captures for each code object. It runs
    nothing where PyTorch leaves it alone, since the step would then run it a second time."""

    def captured(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise UncapturedError("PyTorch does not capture it here")
        return loss_fn(*args, **kwargs)

    assert isinstance(captured, FunctionType)
    captured.__code__ = captured.__code__.replace()
    return captured


def _results(module: fx.GraphModule) -> int:
    """How much a captured function returns. A traced one returns changed inputs, too."""
    return len(pytree.tree_leaves(returned(module)))


_UNSAFE_SPLITS = (torch.ops.aten.unsafe_split, torch.ops.aten.unsafe_split_with_sizes)


def _lies_in_other_rows(joint: fx.GraphModule) -> bool:
    """Whether parts of a tensor may be changed in place, as recurrent cells do on the CPU. Traced,
    what is computed there has memory of its own, without gaps between its rows. Kernels treat what
    is left of a row beside whole vectors by other instructions; nothing is left of 64 elements."""
    return any(
        one.device.type == "cpu" and not one.is_contiguous() and one.shape[-1] % 64
        for node in joint.graph.nodes
        if getattr(node.target, "overloadpacket", None) in _UNSAFE_SPLITS
        for one in node.meta["val"]
    )


def _checkpoints(joint: fx.GraphModule) -> bool:
    return any(node.meta.get("recompute") for node in joint.graph.nodes)


def _extent(one: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if one.is_contiguous():
        return one.nbytes
    last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
    return (last + 1) * one.element_size()


def _written(joint: fx.GraphModule) -> set[int]:
    """Places of inputs that a joint graph changes, itself or by who calls it."""
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {*changed_inputs(joint), *(node.args[0] for node in copies)}
    places = joint.graph.find_nodes(op="placeholder")
    return {place for place, node in enumerate(places) if node in written}


def _without_gradient() -> NoReturn:
    """The plain call tells a loss that is an input, or a view of one, from one without gradient."""
    raise UncapturedError("no operator of the graph has a gradient")


def no_gradient() -> UsageError:
    """What to say of a loss that cannot be differentiated."""
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


def _never(_module: Any, _inputs: Any) -> Callable[..., Any]:
    def backward(*_args: Any) -> Any:
        raise RuntimeError("the step has run its backward pass already")

    return backward


def of_several(inputs: Iterable[Any]) -> str:
    """Whether an input is made of other tensors, which a graph has in its place."""
    for one in inputs:
        if isinstance(one, torch.Tensor) and is_traceable_wrapper_subclass(one):
            return f"a {type(one).__name__} among inputs and parameters; compile the model instead"
    return ""
