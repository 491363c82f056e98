"""`memplan.compile`: a training step, run as one graph in the order that needs the least memory."""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Any, Generic, NoReturn, ParamSpec, Protocol

import torch
from torch import fx
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.utils import preserve_rng_state
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.capture.training.reported_steps import tell
from memplan.runtime.graph.again import Again
from memplan.runtime.graph.compile import Options
from memplan.runtime.graph.dependencies import Operators, operators
from memplan.runtime.graph.eager_kernels import eager_kernels, every_draw
from memplan.runtime.graph.execute import Executable
from memplan.runtime.graph.guarded import Guarded, refusal, strict, unguarded
from memplan.runtime.graph.in_place import in_place
from memplan.runtime.graph.joint import Joint, copied, forward_alone, whole_step
from memplan.runtime.graph.leaves import Leaves
from memplan.runtime.graph.ordering import Ordering, choose_order
from memplan.runtime.graph.passes import Pass, pass_of
from memplan.runtime.graph.program import OF_PARAMETER, Program, facts_of, program_of
from memplan.runtime.graph.recompute import within_budget
from memplan.runtime.graph.report import CompileReport, ProgramReport
from memplan.runtime.graph.updates import SameArithmetic, Updates
from memplan.types.errors import MemplanError, UsageError

log = logging.getLogger("memplan")

P = ParamSpec("P")


_MOST_MADE_AGAIN = 8
"""Times that a graph is made again because the arithmetic of an update changed."""


@dataclass(frozen=True, eq=False)
class _Made:
    """A graph in its order."""

    program: Program
    ordering: Ordering
    recomputed: int
    """Operators that run a second time."""
    classes: list[SameArithmetic]
    first_only: bool
    """Made without the state of some optimizer, whose later steps are others."""

    @property
    def peak_bytes(self) -> int:
        return self.ordering.ordered_peak_bytes

    @cached_property
    def executable(self) -> Executable:
        nodes = self.program.graph_module.graph.nodes
        inputs = [node for node in nodes if node.op == "placeholder"]
        return Executable(self.ordering.nodes, inputs, self.program.output, whole_step=True)


@dataclass(eq=False)
class Compiled:
    """The graph of one set of shapes."""

    make: Callable[[list[Any]], _Made]
    """For primals of the same sizes, as the optimizers are now."""
    made: _Made
    updates: Updates
    results: int
    calls: int = 0
    made_again: int = 0
    began: bool = False
    """Whether the last call came to the graph's first operator."""

    def written_until(self, error: BaseException) -> list[str]:
        """Inputs other than trained parameters that the graph had begun to write, by name."""
        program = self.made.program
        inputs = set(program.inputs)
        return [
            program.storages[index].name
            for node in self._ran_until(error)
            if not facts_of(node).update
            for index in facts_of(node).writes
            if index in inputs
        ]

    def _ran_until(self, error: BaseException) -> list[fx.Node]:
        executable = self.made.executable
        if not self.began:
            return []
        failed = executable.failed_at(error)
        return executable.nodes if failed is None else executable.nodes[: failed + 1]

    def report(self) -> ProgramReport:
        ordering = self.made.ordering
        return ProgramReport(
            operators=ordering.operators,
            plain_peak_bytes=ordering.program_peak_bytes,
            ordered_peak_bytes=ordering.ordered_peak_bytes,
            lower_bound_bytes=ordering.lower_bound_bytes,
            order_seconds=ordering.seconds,
            recomputed=self.made.recomputed,
            calls=self.calls,
        )

    def run(self, primals: list[Any]) -> list[Any]:
        """Forward's results. Empties the list, so that nothing but its owners holds an input."""
        self.began = False
        if not self._fits():
            self.made_again += 1
            self.updates.whole |= self.made_again >= _MOST_MADE_AGAIN
            with preserve_rng_state():
                self.made = self.make(primals)
        self.calls += 1
        self.began = True
        try:
            results = list(self.made.executable(primals)[: self.results])
        except BaseException as error:
            begun = (node.meta.get(OF_PARAMETER) for node in self._ran_until(error))
            self.updates.done |= {one for one in begun if one is not None}
            raise
        self.updates.done |= {id(p) for one in self.made.classes for p in one.parameters}
        return results

    def _fits(self) -> bool:
        """Whether the graph updates parameters as the optimizers do now."""
        made, updates = self.made, self.updates
        if made.first_only and self.calls and updates.in_graph:
            return False
        return not made.classes or (updates.in_graph and updates.refresh(made.classes))


@dataclass(frozen=True)
class _Before:
    """A call, as undoing it wants it."""

    generators: list[tuple[torch.Generator, torch.Generator]]
    versions: list[tuple[torch.Tensor, int]]
    """Of parameters."""


class _Runs(Protocol):
    """The code of one set of shapes."""

    def run(self, primals: list[Any]) -> list[Any]: ...

    def written_until(self, error: BaseException) -> list[str]: ...

    def report(self) -> ProgramReport: ...


class UncapturedError(Exception):
    """PyTorch's capture of a step is not the step."""


class _LookedError(Exception):
    def __init__(self, found: Operators) -> None:
        super().__init__()
        self.found = found


class CompiledStep(Generic[P]):
    """A step as `compile` makes it. Call it with a batch; `report()` says what it does."""

    def __init__(
        self,
        loss_fn: Callable[P, torch.Tensor],
        optimizers: tuple[torch.optim.Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
        options: Options,
    ) -> None:
        functools.update_wrapper(self, loss_fn)
        self.__name__: str = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._loss_fn = loss_fn
        self._scaler = scaler
        self._options = options
        self._updates = Updates(optimizers)
        self._updates.keep_gradients = options.keep_gradients
        self._leaves = Leaves()
        # The same graph with and without updates, and what Inductor does not fuse.
        self._updates.whole = options.accumulate > 1 or options.codegen == "inductor"
        self._programs: list[_Runs] = []
        self._past: list[ProgramReport] = []
        """Of those that are never run again."""
        self._micro = 0
        self._plain_calls = 0
        self._fallback = unguarded()
        self._only_looks = False
        self._ran: _Runs | None = None
        """What began to run in this call."""
        self._captures = 0
        """Of all, anew, because of what no guard compares."""
        self._guarded = Guarded()
        self._graph: Callable[..., Any] = self._captured()
        if self._fallback:
            log.warning("memplan: %s runs plainly: %s", self.__name__, self._fallback)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        if self._micro == 0:
            self._clear()
        last = self._micro == self._options.accumulate - 1
        before = _Before(_generators(), [(p, p._version) for p in self._updates.parameters()])
        self._ran = None
        try:
            run = self._plainly if self._fallback else partial(self._run, last)
            result = run(args, kwargs)
            if last and self._updates.done:
                self._updates.update_rest()
            elif last:
                self._update_all()
        except BaseException as error:
            self._undo(before, error)
            raise
        self._micro = 0 if last else self._micro + 1
        self._updates.in_their_order()
        if last and self._updates.in_graph:
            tell(self._updates.optimizers, self._updates.done)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def report(self) -> CompileReport:
        """What has become of the step so far."""
        return CompileReport([*self._past, *self._reports()], self._plain_calls, self._fallback)

    def _reports(self) -> list[ProgramReport]:
        return [one.report() for one in self._programs]

    def operators(self, *args: P.args, **kwargs: P.kwargs) -> Operators:
        """The whole step as a graph in program order, for these arguments; it is not run.

        Raises UsageError where PyTorch cannot capture it in one graph.
        """
        self._updates.begin()
        self._updates.in_graph = self._can_update_in_graph()
        self._only_looks = self._updates.ahead = True
        try:
            self._graph(*args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, _LookedError):
                return error.inner_exception.found
            raise UsageError(f"no graph: {error.inner_exception}", "another function") from error
        except TorchDynamoException as error:
            raise UsageError(f"no graph: {_reason(error)}", "another function") from error
        finally:
            self._only_looks = self._updates.ahead = False
            self._updates.take_classes()
        raise UsageError("these arguments were compiled before", "another compiled step")

    # One call

    def _run(self, last: bool, args: Any, kwargs: Any) -> Any:
        self._updates.begin()
        self._updates.in_graph = last and self._can_update_in_graph()
        # PyTorch's compiler detaches what it is given.
        given = Leaves().refusal(pytree.tree_leaves((args, kwargs)))
        if why := given or self._leaves.refusal(self._updates.parameters()):
            return self._give_up(why, args, kwargs)
        if not self._programs and (why := _of_several(self._updates.parameters())):
            return self._give_up(why, args, kwargs)
        known = len(self._programs)
        if self._guarded.changed():
            self._captures += 1
            if self._captures > torch._dynamo.config.recompile_limit:
                return self._give_up("what its functions and classes do changes", args, kwargs)
            self._retire()
            self._graph = self._captured()
        try:
            with strict():
                result = self._graph(*args, **kwargs)
        except BaseException as error:
            if self._ran is not None or not isinstance(error, Exception):
                raise
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, MemplanError):
                raise inner from None
            return self._give_up(_reason(inner), args, kwargs)
        if known and len(self._programs) > known:
            log.warning("memplan: %s is captured again, for other shapes or values", self.__name__)
        return result

    def _undo(self, before: _Before, error: BaseException) -> None:
        """After an error in the middle: as before the call where it can be, with words if not."""
        self._micro = 0
        self._clear()
        if self._scaler is not None and self._scaler._scale is not None:
            self._scaler.update(self._scaler.get_scale())  # forgets which gradients are unscaled
        changed = {id(p) for p, version in before.versions if p._version != version}
        updated = len(self._updates.done | changed)
        written = [] if self._ran is None else self._ran.written_until(error)
        if updated or written:
            error.add_note(
                f"memplan: the step is half done: {updated} of {len(before.versions)} parameters "
                f"are updated{''.join(f', {name} is written' for name in written)}. "
                "Load the last checkpoint."
            )
            return
        self._updates.forget_begun()
        _restore(before.generators)
        if isinstance(error, MemplanError):
            return
        again = ", of which the first is the next" if self._options.accumulate > 1 else ""
        buffers = "" if self._ran is None else "buffers, "
        error.add_note(
            f"memplan: weights, {buffers}optimizer state and generators are as before the "
            f"call{'s that gathered gradients' + again if again else ''}; gradients are cleared."
        )

    def _give_up(self, why: str, args: Any, kwargs: Any) -> Any:
        self._leaves.forget()
        result = self._plainly(args, kwargs)
        self._fallback = why
        self._retire()
        log.warning("memplan: %s runs plainly: %s", self.__name__, why)
        return result

    def _retire(self) -> None:
        """Let go of what was compiled; Dynamo keeps it with a function's code."""
        self._past += self._reports()
        self._programs = []
        self._ran = None
        reset_code(self._code)

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        self._plain_calls += 1
        self._updates.done = set()
        result = self._loss_fn(*args, **kwargs)
        losses = [one for one in pytree.tree_leaves(result) if _requires_grad(one)]
        if len(losses) != 1:
            raise UsageError(
                f"the function returns {len(losses)} tensors that require a gradient",
                "return the loss alone, or the others detached",
            )
        if losses[0].numel() != 1:
            raise UsageError(
                f"the function returns a tensor of shape {tuple(losses[0].shape)}, no loss",
                "return one number: loss.mean()",
            )
        loss = losses[0] if self._scaler is None else self._scaler.scale(losses[0])
        loss.backward()
        return result

    def _clear(self) -> None:
        for optimizer in self._updates.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _update_all(self) -> None:
        """As the plain loop ends, where gradients must all be there before the first update."""
        optimizers, scaler = self._updates.optimizers, self._scaler
        if self._options.clip_grad_norm is not None:
            for optimizer in optimizers:
                if scaler is not None:
                    scaler.unscale_(optimizer)
            parameters = list(self._updates.parameters())
            torch.nn.utils.clip_grad_norm_(parameters, self._options.clip_grad_norm)
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        if not self._options.keep_gradients:
            self._clear()

    def _can_update_in_graph(self) -> bool:
        return (
            self._scaler is None
            and self._options.clip_grad_norm is None
            and self._updates.each_by_itself()
        )

    # Compilation

    def _captured(self) -> Callable[..., Any]:
        """A function that PyTorch captures anew."""
        self._guarded = Guarded()
        captured = _own_code(self._loss_fn)
        self._code = captured.__code__
        weakref.finalize(self, reset_code, self._code).atexit = False
        owner = weakref.ref(self)  # Dynamo keeps backends for ever

        def backend(*given: Any, **more: Any) -> Callable[..., Any]:
            compiled: Callable[..., Any] = _there(owner)._backend(*given, **more)
            return compiled

        seen: Any = {"guard_filter_fn": self._guarded.see}
        graph: Callable[..., Any] = torch.compile(
            captured,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            options=seen,
        )
        return graph

    def _backend(self, module: Any, primals: list[Any], **_options: Any) -> Callable[..., Any]:
        if why := refusal(module) or _of_several(primals) or self._not_trained(primals):
            raise UncapturedError(why)

        def refuse(joint: fx.GraphModule, results: int) -> None:
            if _checkpoints(joint) and (results > _results(module) or _writes_inputs(joint)):
                raise UncapturedError(
                    "a checkpoint around what changes a buffer: run twice, it changes it twice"
                )

        if self._options.codegen == "inductor" and not self._only_looks:
            return self._fused(module, primals, refuse)
        joints: list[Joint] = []

        def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
            refuse(joint, num_fwd_outputs)
            joints.append(Joint(copied(joint), inputs, num_fwd_outputs, more))
            forward, backward = map(copied, joints[0].parts())
            gradients = len(_output(backward))
            return forward_alone(forward, backward, num_fwd_outputs, gradients)

        def forward(_module: Any, _inputs: Any) -> Callable[[list[Any]], list[Any]]:
            if not joints:
                _without_gradient()
            owner = weakref.ref(self)

            def make(primals: list[Any]) -> _Made:
                made: _Made = _there(owner)._make(joints[0], primals)
                return made

            return self._boxed(Compiled(make, make(primals), self._updates, joints[0].results))

        compile_parts: Any = aot_module_simplified
        with eager_kernels(), every_draw():
            compiled: Callable[..., Any] = compile_parts(
                module, primals, fw_compiler=forward, bw_compiler=_never, partition_fn=partition
            )
        return compiled

    def _fused(self, module: Any, primals: list[Any], refuse: Any) -> Callable[..., Any]:
        with self._guarded.compiling():
            # Takes seconds to import.
            from memplan.runtime.graph.fused_step import StepParts, fused_step

            parts = StepParts(
                primals,
                self._updates,
                self._scaler,
                keep=self._keeps(),
                base_bytes=self._held_bytes(),
                budget=self._options.budget,
                deadline_seconds=self._options.deadline_seconds,
                refuse=refuse,
                wrap=self._boxed,
                without_gradient=_without_gradient,
            )
            compiled: Callable[..., Any] = fused_step(module, primals, parts)
        return compiled

    def _boxed(self, made: _Runs) -> Callable[[list[Any]], list[Any]]:
        """As PyTorch calls it."""
        self._programs.append(made)
        guarded, owner = self._guarded, weakref.ref(self)

        def boxed(args: list[Any]) -> list[Any]:
            if guarded.refusal:
                raise UncapturedError(guarded.refusal)
            step = _there(owner)
            if why := step._not_trained(args):
                raise UncapturedError(why)
            step._ran = made
            return made.run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def _make(self, joint: Joint, primals: list[Any]) -> _Made:
        options = self._options

        def program(replays: tuple[Again, ...]) -> Program:
            module = whole_step(
                joint, replays, self._updates, self._scaler, primals, keep=self._keeps()
            )
            return program_of(module, self._held_bytes())

        def plain() -> Pass:
            graph = operators(program(()))
            self._updates.take_classes()
            return pass_of(graph)

        def attempt(replays: tuple[Again, ...]) -> _Made:
            graph = operators(in_place(program(replays)))
            classes, first_only = self._updates.take_classes()
            ordering = choose_order(
                graph,
                search=options.order,
                deadline_seconds=options.deadline_seconds,
                seed=options.seed,
            )
            recomputed = sum(len(one.operators) for one in replays)
            return _Made(graph.program, ordering, recomputed, classes, first_only)

        if self._only_looks:
            raise _LookedError(operators(in_place(program(()))))
        return within_budget(plain, attempt, options.budget)

    def _not_trained(self, inputs: Iterable[Any]) -> str:
        """What would happen to gradients that no optimizer wants; empty if they are kept."""
        return Leaves().refusal(one for one in inputs if not self._updates.trains(one))

    def _keeps(self) -> bool:
        if self._options.accumulate > 1:
            return False  # they are added to those that are there
        return self._options.keep_gradients or not self._can_update_in_graph()

    def _held_bytes(self) -> int:
        """Optimizer state, and gradients of earlier calls."""
        parameters = list(self._updates.parameters())
        state = sum(self._updates.state_bytes(one)[0] for one in parameters)
        gradients = sum(one.numel() * one.element_size() for one in parameters)
        return state + (gradients if self._options.accumulate > 1 else 0)


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
    *_, output = module.graph.nodes
    return len(pytree.tree_leaves(output.args))


def _checkpoints(joint: fx.GraphModule) -> bool:
    return any(node.meta.get("recompute") for node in joint.graph.nodes)


def _output(module: fx.GraphModule) -> Any:
    *_, output = module.graph.nodes
    return output.args[0]


def _writes_inputs(joint: fx.GraphModule) -> bool:
    return any(node.target is torch.ops.aten.copy_.default for node in joint.graph.nodes)


def _without_gradient() -> NoReturn:
    raise UsageError(
        "the loss depends on nothing that requires a gradient",
        "a model with parameters that train",
    )


def _never(_module: Any, _inputs: Any) -> Callable[..., Any]:
    def backward(*_args: Any) -> Any:
        raise RuntimeError("the step has run its backward pass already")

    return backward


def _of_several(inputs: Iterable[Any]) -> str:
    """Whether an input is made of other tensors, which a graph has in its place."""
    for one in inputs:
        if isinstance(one, torch.Tensor) and is_traceable_wrapper_subclass(one):
            return f"a {type(one).__name__} among inputs and parameters; compile the model instead"
    return ""


def _generators() -> list[tuple[torch.Generator, torch.Generator]]:
    """Each device's, and a copy: no tensor, which would count among the step's."""
    on_cards = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [(one, one.clone_state()) for one in (torch.default_generator, *on_cards)]


def _restore(generators: list[tuple[torch.Generator, torch.Generator]]) -> None:
    for one, copy in generators:
        one.set_state(copy.get_state())


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _reason(error: BaseException) -> str:
    """An error's first line, and what Dynamo explains."""
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    explained = re.search(r"^ *Explanation: (.*)", str(error), re.MULTILINE)
    return f"{first}: {explained[1]}" if explained else first
