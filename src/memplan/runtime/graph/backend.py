"""`torch.compile(model, backend="memplan")`: compiled regions within a memory budget."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified

from memplan.report.text import format_bytes
from memplan.runtime.graph.compile import EAGER, INDUCTOR, Options, parse_budget
from memplan.runtime.graph.eager_kernels import eager_kernels
from memplan.runtime.graph.execute import Executable
from memplan.runtime.graph.fused import fused_region
from memplan.runtime.graph.in_place import in_place
from memplan.runtime.graph.inductor import unavailable
from memplan.runtime.graph.joint import Joint, copied
from memplan.runtime.graph.operator_graph import operator_graph
from memplan.runtime.graph.ordering import Ordering, choose_order
from memplan.runtime.graph.program import program_of
from memplan.runtime.graph.recompute import within_budget
from memplan.runtime.graph.recompute_problem import problem_without_saves
from memplan.runtime.graph.region import Region, region
from memplan.runtime.graph.rematerialize import NodeReplay
from memplan.runtime.graph.workspaces import is_symbolic
from memplan.types.errors import InfeasibleError, MemplanError, UsageError

log = logging.getLogger("memplan")

_OPTIONS = ("budget", "codegen", "deadline_seconds")


def _options(given: Any) -> Options:
    """The `options` of `torch.compile`; without a `codegen` it is None, for "inductor" where it
    works. Raises UsageError for what is no option, or no value of one."""
    if not isinstance(given, Mapping):
        raise UsageError(f"options={given!r}", 'a dict, such as {"budget": "8GiB"}')
    for name in given:
        if name not in _OPTIONS:
            raise UsageError(f"no option is called {name!r}", f"one of {', '.join(_OPTIONS)}")
    budget = parse_budget(given.get("budget"))
    options = Options(**{"codegen": None, **given, "budget": budget})
    options.check((None, EAGER, INDUCTOR))
    return options


def _raised_by_the_call(backend: Callable[..., Any]) -> Callable[..., Any]:
    """A backend whose errors of memplan are raised when the compiled function is called. Dynamo
    would wrap them in an error of its own, with other advice."""

    @functools.wraps(backend)
    def compiled(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        try:
            made: Callable[..., Any] = backend(*args, **kwargs)
            return made
        except MemplanError as error:
            raised = error

        def fail(*_args: Any) -> Any:
            raise raised.with_traceback(None)

        return fail

    return compiled


@_raised_by_the_call
def memplan(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs forward and backward of a captured graph in the order
    that needs the least memory.

    What forward saves for backward is chosen so that the bytes allocated in both, with the graph's
    inputs and parameters, stay within the budget. A graph with symbolic shapes runs
    plainly. Raises UsageError for bad options and for a budget of such a graph, InfeasibleError
    where a budget cannot be met.
    """
    if mode is not None:
        raise UsageError(f"mode={mode!r}", "options={...}; modes are those of PyTorch Inductor")
    chosen = _options(options or {})
    dynamic = any(map(is_symbolic, inputs))
    hint = "torch.compile(..., dynamic=False), which makes a graph for each shape"
    if dynamic and chosen.budget is not None:
        raise UsageError("a budget for a graph whose shapes may change", hint)
    if _in_fused_kernels(chosen, inputs):
        return fused_region(
            module,
            inputs,
            budget=chosen.budget,
            deadline_seconds=chosen.deadline_seconds,
        )
    if dynamic:
        log.warning("memplan: a graph whose shapes may change runs plainly; try %s", hint)
        return module
    made = _Parts(chosen)
    compile_parts: Any = aot_module_simplified
    # With donated buffers, backward could not run a second time.
    with functorch_config.patch(donated_buffer=False), eager_kernels():
        compiled: Callable[..., Any] = compile_parts(
            module,
            inputs,
            fw_compiler=made.part,
            bw_compiler=made.part,
            inference_compiler=made.inference,
            partition_fn=made.partition,
        )
    return compiled


def _in_fused_kernels(options: Options, inputs: Sequence[Any]) -> bool:
    if options.codegen == EAGER:
        return False
    tensors = (one for one in inputs if isinstance(one, torch.Tensor))
    why = unavailable(one.device for one in tensors)
    if why and options.codegen == INDUCTOR:
        raise UsageError(f"codegen={INDUCTOR!r}: {why}", f"codegen={EAGER!r}")
    if why:
        _say_once(f"memplan: PyTorch's own kernels, nothing is fused: {why}")
    return not why


@functools.cache
def _say_once(words: str) -> None:
    log.warning("%s", words)


@dataclass(frozen=True, eq=False)
class _Attempt:
    region: Region
    parts: tuple[fx.GraphModule, fx.GraphModule]
    ordering: Ordering

    @property
    def peak_bytes(self) -> int:
        return self.ordering.report.ordered_peak_bytes


class _Parts:
    """Forward and backward of one graph. AOTAutograd first asks how to split it (`partition`), then
    for the code of each part (`part`)."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._made: dict[str, Executable] = {}
        """Executables by the source code that fx prints for a part."""

    def partition(
        self, module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward, with the values that forward saves."""
        joint = Joint(module, inputs, num_fwd_outputs, more)
        try:
            chosen = self._choose(joint)
        except ValueError as error:
            self._refuse(error)
            return joint.parts
        executables = chosen.region.executables(chosen.ordering.nodes)
        pairs = zip(chosen.parts, executables, strict=True)
        self._made = {_code(part): one for part, one in pairs}
        return chosen.parts

    def part(self, module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        """The code of a part that `partition` returned. AOTAutograd passes it on, or a copy."""
        executable = self._made.get(_code(module))
        if executable is None:
            if self._made:
                self._refuse(ValueError("hooks on saved tensors change it"))
            return _plainly(module)
        return _boxed(executable)

    def inference(self, module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        """The code of a graph without a backward."""
        try:
            graph = operator_graph(in_place(program_of(copied(module))))
        except ValueError as error:
            self._refuse(error)
            return _plainly(module)
        ordering, program = self._ordering(graph), graph.program
        limit, peak = self._options.budget, ordering.report.ordered_peak_bytes
        if isinstance(limit, int) and peak > limit:
            raise InfeasibleError(
                f"forward alone needs {format_bytes(peak)}, "
                f"{format_bytes(peak - limit)} more than its budget",
                f"budget={peak}, or a smaller batch",
            )
        return _boxed(
            Executable(ordering.nodes, program.placeholders, program.output, grad_mode=False)
        )

    def _choose(self, joint: Joint) -> _Attempt:
        plain, attempt = partial(problem_without_saves, joint), partial(self._attempt, joint)
        return within_budget(plain, attempt, self._options.budget)

    def _attempt(self, joint: Joint, replays: tuple[NodeReplay, ...]) -> _Attempt:
        one = region(joint, replays)
        parts = one.parts()
        graph = operator_graph(in_place(program_of(one.module)))
        return _Attempt(one, parts, self._ordering(graph))

    def _ordering(self, graph: Any) -> Ordering:
        return choose_order(
            graph, search=True, deadline_seconds=self._options.deadline_seconds, seed=0
        )

    def _refuse(self, why: ValueError) -> None:
        """Raises UsageError where there is a budget to keep; else says that the order is kept."""
        if self._options.budget is not None:
            raise UsageError(f"no budget for this graph: {why}", "no budget") from why
        log.warning("memplan: a graph runs in its own order: %s", why)


def _boxed(executable: Executable) -> Callable[[list[Any]], list[Any]]:
    def run(values: list[Any]) -> list[Any]:
        return list(executable(values))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _plainly(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    def run(values: list[Any]) -> Any:
        given = tuple(values)
        values.clear()
        return module.forward(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _code(module: fx.GraphModule) -> str:
    module.recompile()
    return module.code
