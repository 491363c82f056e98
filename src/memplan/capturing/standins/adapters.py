"""Third-party packages that behave otherwise on a machine without a GPU, or with fake tensors."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import Adapter

if TYPE_CHECKING:
    from memplan.capturing.training.ending import Ending

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


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
    library.define("nms" + _NMS)
    library.define("qnms" + _NMS)
    return library


def _there() -> None:
    """A function of a module, since TorchScript compiles it with what calls it."""


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

    def boxes(module: types.ModuleType) -> None:
        # It looks for its operators before it calls the one that there is a rule for.
        if make_torchvision_importable() is not None:
            patches.set(module, "_assert_has_ops", _there)

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
        "torchvision.ops.boxes": boxes,
        "transformers.utils.import_utils": transformers,
        "transformers.trainer_callback": trainer,
    }
