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


def _names(table: str) -> tuple[str, ...]:
    """Names in the form `prefix: name name …`; a dot is the prefix itself."""
    found, prefix = [], ""
    for word in table.split():
        if word.endswith(":"):
            prefix = word[:-1]
        else:
            found.append(prefix if word == "." else f"{prefix}.{word}")
    return tuple(found)


NAMES: dict[str, tuple[str, ...]] = {
    "capturing": _names("""
        torch._C: . DisableTorchFunction DispatchKey.BackendSelect
            DispatchKey.CompositeExplicitAutograd DispatchKey.CompositeImplicitAutograd
            DispatchKey.Python _DisableTorchDispatch _TorchDispatchModeKey.FAKE
            _autograd._get_sequence_nr _current_autograd_node _current_graph_task_id
            _dispatch_get_all_op_names _dispatch_keys _get_default_device _get_dispatch_mode
            _get_sdp_priority_order _len_torch_function_stack _only_lift_cpu_tensors
            _set_only_lift_cpu_tensors
            _set_warn_deprecated_on_mutable_data_ptr _storage_Use_Count _swap_tensor_impl
        torch._subclasses.fake_tensor: . DataDependentOutputException
            DynamicOutputShapeException FakeTensor FakeTensorMode UnsupportedFakeTensorException
            UnsupportedOperatorException
        torch.utils: _python_dispatch _python_dispatch.TorchDispatchMode
            _python_dispatch._get_current_dispatch_mode_stack _pytree _triton.has_triton_package
        torch.cuda: _lazy_init
        torch: Tensor._make_subclass _ops.HigherOrderOperator _ops.OpOverload
            autograd._engine_run_backward jit._builtins._get_builtin_table nn.Module._apply
            nn.attention._registry optim.optimizer._global_optimizer_post_hooks
            optim.optimizer._global_optimizer_pre_hooks
        torch.nested._internal: nested_int.NestedIntNode sdpa
    """),
    "capturing/compiled": _names("""
        torch._C: . DisableTorchFunction DispatchKey.CompositeExplicitAutograd
            _dynamo.eval_frame._FrameAction _dynamo.eval_frame._FrameExecStrategy
        torch._dynamo: config convert_frame convert_frame.input_codes.seen device_interface
            eval_frame exc.BackendCompilerFailed exc.InternalTorchDynamoError output_graph
            trace_rules types.ConvertFrameReturn utils.counters variables variables.optimizer
            variables.torch
        torch._inductor: async_compile codecache.PyCodeCache codegen.triton_split_scan
            compile_fx config fx_passes.joint_graph fx_passes.pad_mm graph ir runtime.hints
            scheduler select_algorithm
        torch._functorch: config
        torch._subclasses.fake_tensor: FakeTensor FakeTensorMode
        torch._higher_order_ops: utils.registered_hop_fake_fns
        torch.utils: _python_dispatch.TorchDispatchMode _python_dispatch._disable_current_modes
            _triton
    """),
    "capturing/distributed": _names("""
        torch._C: _distributed_c10d _distributed_c10d.FakeProcessGroup
            _distributed_c10d._create_work_from_future _distributed_c10d._resolve_process_group
        torch._subclasses.fake_tensor: FakeTensor FakeTensorMode
    """),
    "runtime": _names("""
        torch._C: DisableTorchFunction DispatchKey.ADInplaceOrView _AutoDispatchBelowAutograd
            _DisableAutocast _DisableTorchDispatch _TorchDispatchModeKey.FAKE
            _autograd._pop_saved_tensors_default_hooks
            _autograd._push_saved_tensors_default_hooks
            _autograd._saved_tensors_hooks_get_disabled_error_message
            _autograd._top_saved_tensors_default_hooks _current_graph_task_id
            _dispatch_tls_is_dispatch_key_excluded
            _dispatch_tls_set_dispatch_key_excluded _dynamo.eval_frame _get_dispatch_mode
            _len_torch_function_stack _only_lift_cpu_tensors _set_only_lift_cpu_tensors
            _storage_Use_Count
        torch._subclasses.fake_tensor: FakeTensor FakeTensorMode
        torch.utils: _python_dispatch.TorchDispatchMode _python_dispatch._disable_current_modes
            _python_dispatch._get_current_dispatch_mode_stack
            _python_dispatch.is_traceable_wrapper_subclass _pytree.tree_leaves _pytree.tree_map
        torch.cuda: _pin_memory_utils memory._dump_snapshot memory._record_memory_history
        torch.ops.aten: _unsafe_view.default
        torch: _neg_view _ops.OpOverload autograd.function._SingleLevelFunction
            overrides._get_current_function_mode overrides._pop_mode_temporarily
    """),
    "runtime/graph": _names("""
        torch._C: DispatchKey _AutoDispatchBelowAutograd _DisableAutocast
            _autograd._top_saved_tensors_default_hooks _dynamo.eval_frame.reset_code
            _dynamo.guards.DictGuardManager _is_any_autocast_enabled
        torch._dynamo: config.allow_rnn config.assume_dunder_attributes_remain_unchanged
            config.enable_dynamo_decompositions config.guard_nn_modules
            config.guard_nn_modules_using_dict_tags config.patch
            config.recompile_limit config.skip_fsdp_guards config.skip_nnmodule_hook_guards
            config.skip_no_tensor_aliasing_guards_on_parameters
            config.skip_tensor_guards_with_matching_dict_tags config.trace_numpy
            exc.ObservedAttributeError exc.Unsupported
            exc.unimplemented guards.GuardBuilder guards._get_closure_vars guards.install_guard
            output_graph.OutputGraph
            source.AttrSource source.GlobalSource symbolic_convert
            symbolic_convert.InstructionTranslator
            symbolic_convert.InstructionTranslatorBase
            tensor_version_op._tensor_version types.GuardFilterEntry utils.counters
            utils.preserve_rng_state variables.base.VariableTracker variables.builder
            variables.builtin variables.builtin.GetAttrBuiltinVariable
            variables.constant.ConstantVariable variables.dicts.ConstDictVariable
            variables.dicts.DunderDictVariable
            variables.functions variables.functions.SkipFunctionVariable
            variables.functions.UserFunctionVariable
            variables.functions.WrapperUserFunctionVariable
            variables.hashable.HashableTracker variables.lazy.LazyVariableTracker
            variables.misc.LoggingLoggerVariable variables.misc.ObjectVariable
            variables.misc.SuperVariable
            variables.object_protocol variables.tensor.SymNodeVariable
            variables.tensor.TensorVariable variables.torch.TorchInGraphFunctionVariable
            variables.user_defined.UserDefinedObjectVariable
        torch._inductor: compile_fx.compile_fx compile_fx.compile_fx_inner config
            cpp_builder.get_cpp_compiler custom_graph_pass.CustomPartitionerFn
            dependencies.WeakDep graph.GraphLowering ir lowering.fallback_handler memory
            scheduler scheduler.NopKernelSchedulerNode virtualized.V
        torch._functorch: aot_autograd.aot_module_simplified config
            partitioners.default_partition partitioners.min_cut_rematerialization_partition
        torch._subclasses.fake_tensor: FakeTensorMode
        torch._decomp: decompositions
        torch.utils: _python_dispatch.TorchDispatchMode _python_dispatch._disable_current_modes
            _python_dispatch.is_traceable_wrapper_subclass _pytree
        torch.ops.aten: _cudnn_rnn.default _local_scalar_dense _local_scalar_dense.default
            _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional.default
            _to_copy.default
        torch: _guards.Source _guards.TracingContext _library.fake_impl _ops.HigherOrderOperator
            _ops.OpOverload _ops.OpOverloadPacket _prims.rng_prims.run_and_save_rng_state
            _prims.rng_prims.run_with_rng_state amp.autocast_mode._enter_autocast
            compiler._is_compiling_flag
    """),
    "runtime/planned": _names("""
        torch._C: . _current_graph_task_id _set_cudnn_benchmark
    """),
}
"""Private names of PyTorch by part, which is a folder of memplan."""

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
    """Whether an error was not raised by a frame of PyTorch's or of the job's; frames of the import
    system do not count."""
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
