"""Third-party packages that behave otherwise on a machine without a GPU, or with fake tensors."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import types
from pathlib import Path
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import Adapter
from memplan.capturing.training.ending import Ending

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_POOL = "Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_ARGMAX = _POOL.replace(",", ", Tensor argmax,", 1)
_SIZE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_RATIO = ", int sampling_ratio"
_CONV = (
    "Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask"
)
_OPERATORS = (
    "nms" + _NMS,
    "qnms" + _NMS,
    "_cuda_version() -> int",
    f"roi_align(Tensor input, {_POOL}{_RATIO}, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, {_POOL}, {_SIZE}{_RATIO}, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float "
    "rois_scale, int rois_zero_point, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, {_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, {_ARGMAX}, {_SIZE}) -> Tensor",
    f"ps_roi_align(Tensor input, {_POOL}{_RATIO}) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, {_ARGMAX}{_RATIO}, {_SIZE}) -> Tensor",
    f"ps_roi_pool(Tensor input, {_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, {_ARGMAX}, {_SIZE}) -> Tensor",
    f"deform_conv2d(Tensor input, {_CONV}) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, "
    f"{_CONV}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""What torchvision's binary defines, and gives shapes and gradients of in Python."""


@functools.cache
def make_torchvision_importable() -> torch.library.Library | None:
    """Define the operators that torchvision looks up while it is imported.

    A torchvision built for CUDA cannot load its operators beside a CPU build of PyTorch, and then
    fails on import, as do transformers' model classes. The definitions have no kernels: on tensors
    of the host a script gets an error that names them. Returns what must stay alive, or None when
    torchvision is absent or complete.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    binaries = list(Path(spec.origin).parent.glob("_C*.so"))
    if binaries and _loads(binaries[0]):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _OPERATORS:
        library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")
    return library


def _has_ops() -> bool:
    """A function of a module, since TorchScript compiles it with what calls it."""
    return True


def _loads(binary: Path) -> bool:
    try:
        ctypes.CDLL(str(binary))
    except OSError:
        return False
    return True


def adapters(patches: Patches, ending: Ending) -> dict[str, Adapter]:
    """What to adapt in a capture that ends as `ending` says, by module name."""

    def transformers(module: types.ModuleType) -> None:
        # It takes fake tensors for an export, and then masks attention where a job on real data
        # sees that no mask is needed and uses another kernel.
        if hasattr(module, "is_fake_tensor"):
            patches.set(module, "is_fake_tensor", lambda x: False)

    def trainer(module: types.ModuleType) -> None:
        # Every so many steps it evaluates and saves: in a capture, after the last step.
        flow = getattr(module, "DefaultFlowCallback", None)
        if flow is None:
            return
        on_step_end = flow.on_step_end

        def on_last_step_end(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
            control = on_step_end(self, args, state, control, **more)
            if ending.draining:
                control.should_evaluate |= args.eval_strategy != "no"
                control.should_save |= args.save_strategy != "no"
                control.should_training_stop = True
            return control

        patches.set(flow, "on_step_end", on_last_step_end)

    def lightning(module: types.ModuleType) -> None:
        # It evaluates after as many batches as were counted beforehand: in a capture, after the
        # last step.
        loop = getattr(module, "_TrainingEpochLoop", None)
        counts = getattr(loop, "_should_check_val_fx", None)
        if counts is None:
            return

        def evaluates(self: Any, *args: Any, **more: Any) -> bool:
            evaluates_ever = ending.draining and self.trainer.enable_validation
            return bool(counts(self, *args, **more) or evaluates_ever)

        patches.set(loop, "_should_check_val_fx", evaluates)

    def torchvision(module: types.ModuleType) -> None:
        # It asks before it registers the shapes of its operators, and before it calls one.
        if make_torchvision_importable() is not None:
            patches.set(module, "_has_ops", _has_ops)

    def torchaudio(module: types.ModuleType) -> None:
        # One built for CUDA cannot load its operators beside a CPU build of PyTorch and then fails
        # on import. It does without them where their file is not found.
        real_load: Any = getattr(module, "_load_lib", None)
        if real_load is None:
            return

        def load_lib(*args: Any, **kwargs: Any) -> bool:
            try:
                return bool(real_load(*args, **kwargs))
            except OSError:
                return False

        patches.set(module, "_load_lib", load_lib)

    return {
        "lightning.pytorch.loops.training_epoch_loop": lightning,
        "pytorch_lightning.loops.training_epoch_loop": lightning,
        "torchaudio._extension.utils": torchaudio,
        "torchvision.extension": torchvision,
        "transformers.utils.import_utils": transformers,
        "transformers.trainer_callback": trainer,
    }
