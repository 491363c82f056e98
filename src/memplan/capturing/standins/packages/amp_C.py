# ruff: noqa: N999 (the name is that of the real module)
"""Stand-in for Apex's kernels over lists of tensors (NVIDIA/apex, `csrc/amp_C_frontend.cpp`)."""

from __future__ import annotations

from memplan.capturing.standins.extension_names import Extension
from memplan.capturing.standins.multi_tensor import kernels

_rule = Extension("amp_C", "NVIDIA/apex, csrc/multi_tensor_l2norm_kernel.cu")
_IN_PLACE = (
    "multi_tensor_scale",
    "multi_tensor_axpby",
    "multi_tensor_sgd",
    "multi_tensor_adagrad",
    "multi_tensor_novograd",
    "multi_tensor_lamb",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
)
_NORMS = ("multi_tensor_l2norm", "multi_tensor_l2norm_mp", "multi_tensor_unscale_l2norm")

globals().update(kernels(_rule, "apex", in_place=_IN_PLACE, norms=_NORMS))
