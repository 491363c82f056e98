"""The enumerations of the extension, with its numbers.

Source: Transformer Engine 2.20.2, `common/util/pybind_helper.h`, `common/include/
transformer_engine/{transformer_engine,fused_attn,fused_router,comm_gemm_overlap}.h`,
`pytorch/csrc/common.h`.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

import torch

from memplan.capturing.standins.extension_names import mentioned


class _Numbers(IntEnum):
    """Members of the extension's enumerations equal those of others by their number alone."""

    def __eq__(self, other: object) -> bool:
        number: Any = other
        return int(self) == int(number) if isinstance(other, (int, Enum)) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int.__hash__(self)


_numbered: Any = _Numbers
"""Called, it makes an enumeration."""


def _counted(name: str, members: str, prefix: str = "", start: int = 0) -> Any:
    names = [prefix + member for member in members.split()]
    return _numbered(name, {member: start + i for i, member in enumerate(names)}, module=__name__)


class DType(_Numbers):
    """Types of elements."""

    kByte = 0  # noqa: N815
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}

NVTE_Bias_Type = _counted("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI", "NVTE_")
NVTE_Mask_Type = _counted(
    "NVTE_Mask_Type",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_",
)
NVTE_Softmax_Type = _counted(
    "NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX", "NVTE_"
)
NVTE_QKV_Format = _counted(
    "NVTE_QKV_Format",
    "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET",
    "NVTE_",
)
NVTE_QKV_Layout = _counted(
    "NVTE_QKV_Layout",
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
    "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD "
    "THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD "
    "Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD "
    "Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET",
    "NVTE_",
)
_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
if "NVTE_F16_max512_seqlen" in mentioned("transformer_engine"):
    _BACKENDS["NVTE_F16_max512_seqlen"] = 0
NVTE_Fused_Attn_Backend: Any = _numbered("NVTE_Fused_Attn_Backend", _BACKENDS, module=__name__)
NVTEScalingMode: Any = _numbered(
    "NVTEScalingMode",
    {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
    module=__name__,
)
Float8BlockScaleTensorFormat = _counted(
    "Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID"
)
NVTERoutingMapFormat = _counted("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _counted("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
CommOverlapType = _counted("CommOverlapType", "RS AG")
CommOverlapAlgo = _counted(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P "
    "EXTERNAL_BULK_OVERLAP_AG",
)
FP8FwdTensors = _counted(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
    "GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _counted(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
)
