"""What memplan takes from inside PyTorch: private names, which a release may drop without a word.

Three things make a sentence of a dropped name, and keep its loss to the part that needs it:

- `require` looks for the names of a part before that part begins. A test holds the lists to what
  the sources use, and `docs/private-names.md`, which has the reasons, to the lists.
- `Patches.set` replaces no private name that is not there: what nobody calls would go unseen.
- `refusal` turns an error about a name that PyTorch lacks into the sentence, wherever memplan was
  when it met it. Where that was while a module was adapted (`importing`), using that module is
  refused and nothing else.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from memplan.types.errors import CaptureError

NAMES: dict[str, tuple[str, ...]] = {
    "capturing": (
        "torch.Tensor._make_subclass",
        "torch._C",
        "torch._C.DisableTorchFunction",
        "torch._C.DispatchKey.BackendSelect",
        "torch._C.DispatchKey.CompositeExplicitAutograd",
        "torch._C.DispatchKey.CompositeImplicitAutograd",
        "torch._C.DispatchKey.Python",
        "torch._C._DisableTorchDispatch",
        "torch._C._TorchDispatchModeKey.FAKE",
        "torch._C._autograd._get_sequence_nr",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch._C._disabled_torch_dispatch_impl",
        "torch._C._dispatch_get_all_op_names",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "torch._C._dispatch_keys",
        "torch._C._get_default_device",
        "torch._C._get_dispatch_mode",
        "torch._C._get_sdp_priority_order",
        "torch._C._len_torch_function_stack",
        "torch._C._only_lift_cpu_tensors",
        "torch._C._set_only_lift_cpu_tensors",
        "torch._C._set_warn_deprecated_on_mutable_data_ptr",
        "torch._C._storage_Use_Count",
        "torch._C._swap_tensor_impl",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch._subclasses.fake_tensor",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
        "torch._subclasses.fake_tensor.UnsupportedOperatorException",
        "torch.autograd._engine_run_backward",
        "torch.cuda._lazy_init",
        "torch.jit._builtins._get_builtin_table",
        "torch.nn.Module._apply",
        "torch.nn.attention._registry",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.utils._python_dispatch",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._pytree",
        "torch.utils._triton.has_triton_package",
    ),
    "capturing/compiled": (
        "torch._C",
        "torch._C.DisableTorchFunction",
        "torch._C.DispatchKey.CompositeExplicitAutograd",
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._dynamo.config",
        "torch._dynamo.convert_frame",
        "torch._dynamo.convert_frame.input_codes.seen",
        "torch._dynamo.device_interface",
        "torch._dynamo.eval_frame",
        "torch._dynamo.exc.BackendCompilerFailed",
        "torch._dynamo.exc.InternalTorchDynamoError",
        "torch._dynamo.output_graph",
        "torch._dynamo.trace_rules",
        "torch._dynamo.types.ConvertFrameReturn",
        "torch._dynamo.utils.counters",
        "torch._dynamo.variables",
        "torch._dynamo.variables.optimizer",
        "torch._dynamo.variables.torch",
        "torch._functorch.config",
        "torch._higher_order_ops.utils.registered_hop_fake_fns",
        "torch._inductor.async_compile",
        "torch._inductor.codecache.PyCodeCache",
        "torch._inductor.compile_fx",
        "torch._inductor.config",
        "torch._inductor.fx_passes.joint_graph",
        "torch._inductor.fx_passes.pad_mm",
        "torch._inductor.graph",
        "torch._inductor.ir",
        "torch._inductor.runtime.hints",
        "torch._inductor.scheduler",
        "torch._inductor.select_algorithm",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.cuda._exchange_device",
        "torch.cuda._maybe_exchange_device",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._triton",
    ),
    "capturing/distributed": (
        "torch._C._distributed_c10d",
        "torch._C._distributed_c10d.FakeProcessGroup",
        "torch._C._distributed_c10d._create_work_from_future",
        "torch._C._distributed_c10d._resolve_process_group",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
    ),
    "runtime": (
        "torch._C.DisableTorchFunction",
        "torch._C.DispatchKey.ADInplaceOrView",
        "torch._C.DispatchKey.AutocastCPU",
        "torch._C.DispatchKey.AutocastCUDA",
        "torch._C.DispatchKeySet",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._DisableTorchDispatch",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C._TorchDispatchModeKey.FAKE",
        "torch._C._autograd._pop_saved_tensors_default_hooks",
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._C._cuda_getCurrentRawStream",
        "torch._C._current_graph_task_id",
        "torch._C._disabled_torch_function_impl",
        "torch._C._dispatch_tls_is_dispatch_key_excluded",
        "torch._C._dispatch_tls_set_dispatch_key_excluded",
        "torch._C._dynamo.eval_frame",
        "torch._C._get_cudnn_enabled",
        "torch._C._get_dispatch_mode",
        "torch._C._get_fp32_precision_getter",
        "torch._C._get_mkldnn_enabled",
        "torch._C._len_torch_function_stack",
        "torch._C._only_lift_cpu_tensors",
        "torch._C._set_cudnn_enabled",
        "torch._C._set_fp32_precision_setter",
        "torch._C._set_mkldnn_enabled",
        "torch._C._set_only_lift_cpu_tensors",
        "torch._C._storage_Use_Count",
        "torch._conj",
        "torch._neg_view",
        "torch._ops.OpOverload",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.autograd.function._SingleLevelFunction",
        "torch.cuda.memory._dump_snapshot",
        "torch.cuda.memory._record_memory_history",
        "torch.ops.aten._unsafe_view.default",
        "torch.overrides._get_current_function_mode",
        "torch.overrides._pop_mode_temporarily",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
    ),
    "runtime/graph": (
        "torch._C.DispatchKey",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._DisableAutocast",
        "torch._C._dynamo.eval_frame.reset_code",
        "torch._C._dynamo.guards.DictGuardManager",
        "torch._C._is_any_autocast_enabled",
        "torch._C._set_grad_enabled",
        "torch._dynamo.config.allow_rnn",
        "torch._dynamo.config.assume_dunder_attributes_remain_unchanged",
        "torch._dynamo.config.guard_nn_modules",
        "torch._dynamo.config.guard_nn_modules_using_dict_tags",
        "torch._dynamo.config.patch",
        "torch._dynamo.config.recompile_limit",
        "torch._dynamo.config.skip_fsdp_guards",
        "torch._dynamo.config.skip_nnmodule_hook_guards",
        "torch._dynamo.config.skip_no_tensor_aliasing_guards_on_parameters",
        "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags",
        "torch._dynamo.config.trace_numpy",
        "torch._dynamo.exc.BackendCompilerFailed",
        "torch._dynamo.exc.ObservedAttributeError",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.guards.GuardBuilder",
        "torch._dynamo.guards._get_closure_vars",
        "torch._dynamo.guards.install_guard",
        "torch._dynamo.source.GlobalSource",
        "torch._dynamo.symbolic_convert",
        "torch._dynamo.symbolic_convert.InstructionTranslator",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
        "torch._dynamo.symbolic_convert.is_stdlib",
        "torch._dynamo.tensor_version_op._tensor_version",
        "torch._dynamo.types.GuardFilterEntry",
        "torch._dynamo.utils.counters",
        "torch._dynamo.utils.preserve_rng_state",
        "torch._dynamo.variables.base.VariableTracker",
        "torch._dynamo.variables.builtin",
        "torch._dynamo.variables.builtin.GetAttrBuiltinVariable",
        "torch._dynamo.variables.constant.ConstantVariable",
        "torch._dynamo.variables.dicts.ConstDictVariable",
        "torch._dynamo.variables.dicts.DunderDictVariable",
        "torch._dynamo.variables.functions.SkipFunctionVariable",
        "torch._dynamo.variables.functions.UserFunctionVariable",
        "torch._dynamo.variables.hashable.HashableTracker",
        "torch._dynamo.variables.lazy.LazyVariableTracker",
        "torch._dynamo.variables.misc.LoggingLoggerVariable",
        "torch._dynamo.variables.misc.ObjectVariable",
        "torch._dynamo.variables.object_protocol",
        "torch._dynamo.variables.tensor.SymNodeVariable",
        "torch._dynamo.variables.tensor.TensorVariable",
        "torch._dynamo.variables.user_defined.UserDefinedObjectVariable",
        "torch._functorch.aot_autograd.aot_module_simplified",
        "torch._functorch.config",
        "torch._functorch.partitioners.default_partition",
        "torch._functorch.partitioners.min_cut_rematerialization_partition",
        "torch._guards.Source",
        "torch._guards.TracingContext",
        "torch._inductor.compile_fx.compile_fx",
        "torch._inductor.compile_fx.compile_fx_inner",
        "torch._inductor.config",
        "torch._inductor.cpp_builder.get_cpp_compiler",
        "torch._inductor.custom_graph_pass.CustomPartitionerFn",
        "torch._inductor.dependencies.WeakDep",
        "torch._inductor.graph.GraphLowering",
        "torch._inductor.ir",
        "torch._inductor.lowering.fallback_handler",
        "torch._inductor.memory",
        "torch._inductor.scheduler",
        "torch._inductor.scheduler.NopKernelSchedulerNode",
        "torch._inductor.virtualized.V",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch._prims.rng_prims.run_and_save_rng_state",
        "torch._prims.rng_prims.run_with_rng_state",
        "torch.compiler._is_compiling_flag",
        "torch.ops.aten._local_scalar_dense",
        "torch.ops.aten._local_scalar_dense.default",
        "torch.ops.aten._native_batch_norm_legit.no_stats",
        "torch.ops.aten._native_batch_norm_legit_functional.default",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "torch.utils._pytree",
    ),
    "runtime/planned": (
        "torch._C",
        "torch._C._current_graph_task_id",
        "torch._C._set_cudnn_benchmark",
    ),
}
"""By part, which is a folder of memplan."""

_ONLY_WITH_CUDA = "torch._C._cuda_"
_NOT_IMPORTED = re.compile(r"cannot import name '(\w+)' from '(torch[\w.]*)'")
_MEMPLAN = str(Path(__file__).parents[2]) + "/"


class MissingNameError(CaptureError):
    """The installed PyTorch lacks a private name that memplan uses."""

    def __init__(self, *names: str) -> None:
        from torch import __version__

        super().__init__(
            f"PyTorch {__version__} has no {', '.join(names)}, which memplan takes from inside it",
            "another release of memplan, or one of PyTorch's that docs/support.md says works",
        )


@functools.cache
def require(part: str) -> None:
    """Raises MissingNameError where the installed PyTorch lacks a name of `part`."""
    lacking = list(_lacking(NAMES[part]))
    if lacking:
        raise MissingNameError(*lacking)


def _lacking(names: tuple[str, ...]) -> Iterator[str]:
    import torch

    for name in names:
        if name.startswith(_ONLY_WITH_CUDA) and not hasattr(torch._C, "_cuda_init"):
            continue
        try:
            _find(name)
        except (AttributeError, ImportError):
            yield name


def _find(name: str) -> Any:
    """What a dotted name means, of the longest module in it, imported if nobody has."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        place = ".".join(words[:length])
        try:
            found: Any = sys.modules.get(place) or importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, words[length:], found)
    raise ImportError(name)


def refusal(error: BaseException) -> MissingNameError | None:
    """What to say of an error that memplan met in taking a name that PyTorch lacks; else None."""
    if not _raised_by_memplan(error):
        return None
    if isinstance(error, AttributeError) and error.name and (owner := torch_name(error.obj)):
        return MissingNameError(f"{owner}.{error.name}")
    if isinstance(error, ImportError) and (found := _NOT_IMPORTED.search(str(error))):
        return MissingNameError(f"{found[2]}.{found[1]}")
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("torch."):
        return MissingNameError(str(error.name))
    return None


def _raised_by_memplan(error: BaseException) -> bool:
    """Not by a frame of PyTorch's or of the job's; the machinery of imports does not count."""
    files = [
        frame.f_code.co_filename
        for frame, _ in _walk(error)
        if not frame.f_code.co_filename.startswith("<frozen importlib")
    ]
    return bool(files) and files[-1].startswith(_MEMPLAN)


def _walk(error: BaseException) -> Iterator[tuple[Any, int]]:
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def torch_name(owner: Any) -> str:
    """The dotted name of a module or class of PyTorch, or of an object's class; else nothing."""
    if isinstance(owner, ModuleType):
        name = owner.__name__
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name.split(".")[0] == "torch" else ""


def is_missing(owner: Any, name: str) -> bool:
    """Whether a private name of PyTorch's is not there."""
    return name.startswith("_") and bool(torch_name(owner)) and not hasattr(owner, name)
