"""Dynamo and AOTAutograd during a capture.

Dynamo inlines the Python that it traces, `Module.__call__` and `nn.Parameter` included, so for the
length of a compilation the capture's patches of what a model calls are taken out. What answers
questions about the device stays: Inductor asks them. Dispatch modes need no care: Dynamo leaves
them itself while it compiles (`CatchErrorsWrapper` in `torch/_dynamo/convert_frame.py`), for modes
that say `ignore_compile_internals`.

What cannot be compiled here runs as it would without `torch.compile`, and an assumption says so.
"""

from __future__ import annotations

import re
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction as FrameAction,
)
from torch._C._dynamo.eval_frame import (
    _FrameExecStrategy as FrameExecStrategy,
)
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, eval_frame, output_graph, trace_rules, variables
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables import optimizer as traced_optimizers
from torch._dynamo.variables import torch as traced_functions
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memplan.capturing.compiled import flex
from memplan.capturing.patches import attributes as patching
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.recording.context import shown_path
from memplan.capturing.standins.finder import PACKAGES, without_triton
from memplan.capturing.standins.registry import RuledOperator
from memplan.capturing.standins.rules import Rule
from memplan.capturing.state import CaptureState
from memplan.capturing.training import periods, plain_loops
from memplan.types.errors import MemplanError, first_line
from memplan.types.trace import Provenance

_CAPTURE = str(Path(__file__).parents[1]) + "/"
_TRACES = str(Path(__file__).parents[2] / "types") + "/"
"""What the capture writes and compares its events with."""
_ANSWERING = ("torch.cuda", "torch.backends", "torch.version", "torch.accelerator")
_SETTINGS = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False}
_AUTOGRAD_SETTINGS = {
    "enable_autograd_cache": False,
    "enable_remote_autograd_cache": False,
    # Else the backward graph is compiled in the autograd engine's thread, with modes in force.
    "force_non_lazy_backward_lowering": True,
    # It hands over generators of the device; without it, states of the host's, of no size here.
    "graphsafe_rng_functionalization": False,
}
_SHOWN = 200
_HALTED = "import of triton halted"
_NO_TRITON = (
    "it launches a Triton kernel, which compilers do not see in the stand-in: install Triton, "
    "which needs no GPU"
)
_OF_A_CUDA_BUILD: dict[str, Any] = {
    "_cuda_CUDAAllocator_AllocatorState": object,
    "_set_cached_tensors_enabled": lambda _enabled: None,
    "_cuda_getCurrentRawStream": lambda _index: 0,
    "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
}
"""What PyTorch's compilers import from a build for CUDA, which this one says it is."""


def install(stack: ExitStack, patches: Patches, of_capture: Patches, state: CaptureState) -> None:
    """Make Dynamo pass over the capture's own frames, and take the capture's patches out while it
    compiles, until `patches.undo()` and `stack` is closed."""
    stack.enter_context(dynamo_config.patch(_SETTINGS))
    stack.enter_context(functorch_config.patch(_AUTOGRAD_SETTINGS))
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    _know_answers(stack, of_capture)
    suspension = _Suspension(of_capture)
    patches.set(patching, "as_compilers_see", suspension.active)
    compile_frame: Any = convert_frame.CatchErrorsWrapper.__call__
    compile_graph: Any = output_graph.OutputGraph.call_user_compiler

    failed: set[types.CodeType] = set()

    def call(wrapper: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        lenient = dynamo_config.suppress_errors
        strict = dynamo_config.patch(suppress_errors=False) if lenient else nullcontext()
        with suspension.active(), strict, _without_modes(), without_triton():
            try:
                return compile_frame(wrapper, frame, *args, **kwargs)
            except Exception as error:
                if not (lenient or isinstance(error, InternalTorchDynamoError)):
                    raise
                _not_compiled(state, frame.f_code, frame.f_lineno, error)
                if not getattr(wrapper._torchdynamo_orig_backend, "_one_graph", False):
                    return ConvertFrameReturn()
                failed.add(frame.f_code)  # what it calls would have been part of its graph
                skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
                return ConvertFrameReturn(frame_exec_strategy=skip)

    def call_user_compiler(output: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return _as_forward(state, compile_graph(output, module, *args, **kwargs))
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, MemplanError):
                raise error from error.inner_exception  # a real run would be refused, too
            code = output.root_tx.f_code
            _not_compiled(state, code, code.co_firstlineno, error.inner_exception)
            return _as_eager(state, module.forward)

    _forgive(patches, failed)
    _record_states(patches, state)
    flex.install(stack, state)
    for name, stand_in in _OF_A_CUDA_BUILD.items():
        if not hasattr(torch._C, name):
            patches.set(torch._C, name, stand_in, new=True)
    patches.set(convert_frame.CatchErrorsWrapper, "__call__", call)
    patches.set(output_graph.OutputGraph, "call_user_compiler", call_user_compiler)
    # Constants of a traced program must not be computed on the device: there is none.
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda _mode: True))
    real: Any = proxy_tensor.unset_fake_temporarily  # type: ignore[attr-defined]

    @contextmanager
    def real_on_host() -> Iterator[None]:
        with real(), OnHost():  # type: ignore[no-untyped-call]
            yield

    patches.set(proxy_tensor, "unset_fake_temporarily", real_on_host)
    files = f"{PACKAGES}/", plain_loops.__file__, periods.__file__
    traced = "|".join(map(re.escape, files))
    ours = f"^(?!{traced}){re.escape(_CAPTURE)}|^{re.escape(_TRACES)}"
    pattern = f"{trace_rules.SKIP_DIRS_RE.pattern}|{ours}"
    patches.set(trace_rules, "SKIP_DIRS", [*trace_rules.SKIP_DIRS, _CAPTURE, _TRACES])
    patches.set(trace_rules, "SKIP_DIRS_RE", re.compile(pattern))


def _forgive(patches: Patches, failed: set[types.CodeType]) -> None:
    """PyTorch raises where `fullgraph` found no frame to compile."""
    count: Any = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)

    def frames(number: int) -> int:
        before: int = count(number)
        return before or len(failed)

    if count is not None:
        patches.set(eval_frame, "set_fullgraph_compiled_frame_count", frames)


def _without_modes() -> AbstractContextManager[Any]:
    """Below DistributedDataParallel Dynamo splits graphs at its buckets, and leaves modes on."""
    split = DistributedDataParallel._active_ddp_module is not None
    return _disable_current_modes() if split else nullcontext()


def _record_states(patches: Patches, state: CaptureState) -> None:
    """Dynamo does not trace how an optimizer makes its state: it has it done, with no mode in
    force (`torch/_dynamo/variables/optimizer.py`)."""
    variable: Any = traced_optimizers.OptimizerVariable
    call_for_real, move_for_real = variable.call_method, variable.move_step_if_cpu

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "_init_group" or not hasattr(self.value, name):
            return call_for_real(self, tx, name, args, kwargs)
        make = self.value._init_group

        def make_state(*args: Any, **kwargs: Any) -> Any:
            with state.mode:
                return make(*args, **kwargs)

        self.value._init_group = make_state
        try:
            return call_for_real(self, tx, name, args, kwargs)
        finally:
            del self.value._init_group

    def move_step_if_cpu(self: Any) -> None:
        with state.mode:
            move_for_real(self)

    patches.set(variable, "call_method", call_method)
    patches.set(variable, "move_step_if_cpu", move_step_if_cpu)


def _as_forward(state: CaptureState, compiled: Any) -> Any:
    """AOTAutograd's forward is an `autograd.Function`, in which autograd is off."""
    context = state.context

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        context.in_function += 1
        try:
            return compiled(*args, **kwargs)
        finally:
            context.in_function -= 1

    return run


def _as_eager(state: CaptureState, forward: Any) -> Any:
    """What stands for a graph that could not be compiled: at most what eager makes."""
    recorder = state.recorder

    def run(*args: Any, **kwargs: Any) -> Any:
        before = recorder.at_most, recorder.provenance
        recorder.at_most, recorder.provenance = True, Provenance.ASSUMED
        try:
            return forward(*args, **kwargs)
        finally:
            recorder.at_most, recorder.provenance = before

    return run


def _know_answers(stack: ExitStack, of_capture: Patches) -> None:
    """Dynamo knows the functions of PyTorch by their identity: what it makes of one holds of the
    function that answers in its place."""
    with of_capture.suspended(lambda *_patch: True):
        rules: Any = trace_rules.get_torch_obj_rule_map()
        variables.TorchInGraphFunctionVariable._get_handlers()
    foldable: Any = traced_functions.constant_fold_functions
    for owner, name, original in of_capture.originals():
        if not isinstance(original, types.FunctionType | types.BuiltinFunctionType):
            continue
        answer = getattr(owner, name)
        for table in (rules, foldable):
            if original in table and answer not in table:
                table[answer] = table[original]
                stack.callback(table.pop, answer, None)


def _not_compiled(
    state: CaptureState, code: types.CodeType, line: int, error: BaseException
) -> None:
    shown = shown_path(code.co_filename)
    first = first_line(error)
    reason = _NO_TRITON if _HALTED in first else f"{type(error).__name__}: {first[:_SHOWN]}"
    state.assumptions.add(
        "compile",
        f"could not be compiled here ({reason}): captured as eager, which mostly needs more memory",
        source=f"{shown}:{line}" if shown else state.source(),
    )


class _Suspension:
    """Takes a session's patches out and puts them in again; nested uses do so once."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._depth = 0
        self._lock = threading.RLock()

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._lock:  # the engine's threads compile too
            self._depth += 1
            try:
                if self._depth > 1:
                    yield
                else:
                    with self._patches.suspended(_is_seen_by_a_model):
                        yield
            finally:
                self._depth -= 1


def _is_seen_by_a_model(owner: Any, name: str, before: Any) -> bool:
    """Whether a patch is to be taken out: all but functions that answer for the device, and users'
    rules, which break the graph: what they stand for could not be traced."""
    if isinstance(vars(owner).get(name), Rule | RuledOperator):
        return False
    if not isinstance(owner, types.ModuleType) or owner is torch:
        return True
    return not owner.__name__.startswith(_ANSWERING) or isinstance(before, type)


class OnHost(TorchDispatchMode):
    """Computes on the host what a compiler asks for on the device: constants of a graph."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        moved = {name: _to_host(item) for name, item in (kwargs or {}).items()}
        return func(*map(_to_host, args), **moved)


def _to_host(item: Any) -> Any:
    if isinstance(item, torch.device) and item.type == "cuda":
        return torch.device("cpu")
    return item
