"""Kernels over lists of tensors."""

from __future__ import annotations

from memplan.capturing.standins.extension_names import ExtensionFunction, transformer_engine
from memplan.capturing.standins.multi_tensor import kernels

_rule = transformer_engine("multi_tensor/")
_IN_PLACE = (
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_adam",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_sgd",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
)
_NORMS = ("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")


def functions() -> dict[str, ExtensionFunction]:
    return kernels(_rule, "transformer_engine", in_place=_IN_PLACE, norms=_NORMS)
