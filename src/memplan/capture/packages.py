"""Third-party packages that behave otherwise on a machine without a GPU, or with fake tensors."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import types
from pathlib import Path

import torch

from memplan.capture.importing import Adapter
from memplan.capture.patching import Patches

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@functools.cache
def make_torchvision_importable() -> torch.library.Library | None:
    """Define the operators that torchvision looks up while it is imported.

    A torchvision built for CUDA cannot load its operators beside a CPU build of PyTorch, and then
    fails on import, as do transformers' model classes. The definitions have no kernels: a script
    that calls them gets an error that names them. Returns what must stay alive, or None when
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


def _loads(binary: Path) -> bool:
    try:
        ctypes.CDLL(str(binary))
    except OSError:
        return False
    return True


def adapters(patches: Patches) -> dict[str, Adapter]:
    """What to adapt in a capture, by module name."""

    def transformers(module: types.ModuleType) -> None:
        # It takes fake tensors for an export, and then masks attention where a job on real data
        # sees that no mask is needed and uses another kernel.
        if hasattr(module, "is_fake_tensor"):
            patches.set(module, "is_fake_tensor", lambda _tensor: False)

    return {"transformers.utils.import_utils": transformers}
