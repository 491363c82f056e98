"""cuBLAS and cuBLASLt workspaces: taken from the caching allocator, by thread and stream, kept.

Source: pytorch `aten/src/ATen/cuda/CublasHandlePool.cpp` and `aten/src/ATen/native/cuda/Blas.cpp`.
A handle belongs to a thread (the forward thread and each device's autograd thread have their own),
and a workspace to a (handle, stream). It is allocated at the first call and freed only by
`torch._C._cuda_clearCublasWorkspaces()`, which CUDA graphs call. See docs/kernels.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memplan.capturing.kernels.model import MIB, Shape

_KIB = 1 << 10
_DEFAULT = 4096 * 2 * _KIB + 16 * 8 * _KIB
_LARGE = 32 * MIB
_PAIR = re.compile(r":([0-9]+):([0-9]+)")

BLAS_OPS = frozenset(
    f"aten.{name}"
    for name in (
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "baddbmm",
        "baddbmm_",
        "addbmm",
        "addmv",
        "addmv_",
        "mv",
        "dot",
        "vdot",
        "_addmm_activation",
        "_int_mm",
        "_scaled_mm",
        "linalg_solve_triangular",
        "triangular_solve",
        "linalg_lu_solve",
        "linalg_inv_ex",
        "_slow_conv2d_forward",
        "_slow_conv2d_backward",
        "slow_conv_dilated2d",
        "slow_conv_dilated3d",
        "slow_conv_transpose2d",
        "slow_conv_transpose3d",
    )
)
"""Operator packets whose CUDA kernels ask for a cuBLAS handle, as long as nothing is empty."""


def cublas_workspace_bytes(capability: tuple[int, int], env: Mapping[str, str]) -> int:
    """Size of one cuBLAS workspace (`parseChosenWorkspaceSize`).

    `CUBLAS_WORKSPACE_CONFIG` is a list of `:KiB:count`; unreadable text means the default.
    """
    pairs = _PAIR.findall(env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * _KIB * int(count) for size, count in pairs)
    return _LARGE if capability[0] in (9, 10, 11, 12) else _DEFAULT


def _lt_shares_workspace(env: Mapping[str, str]) -> bool:
    """Whether cuBLASLt shares cuBLAS's workspace: only if asked for. PyTorch 2.11 takes 1 MiB
    beside cuBLAS's own (measured on an H200). Later releases say that they share by default; for
    these, 1 MiB for each thread may be too much."""
    return env.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1"


def cublaslt_workspace_bytes(capability: tuple[int, int], env: Mapping[str, str]) -> int:
    """Largest workspace that cuBLASLt may use; `CUBLASLT_WORKSPACE_SIZE` is in KiB."""
    shared = _lt_shares_workspace(env)
    cublas = cublas_workspace_bytes(capability, env)
    size = cublas if shared else MIB
    text = env.get("CUBLASLT_WORKSPACE_SIZE", "")
    if re.match(r"\s*\d+", text):
        size = int(re.findall(r"\d+", text)[0]) * _KIB
    return min(size, cublas) if shared else size


def addmm_uses_cublaslt(
    *,
    mat1: Shape,
    mat2: Shape,
    bias: Shape,
    bias_contiguous: bool,
    beta: float,
    dtype: str,
    env: Mapping[str, str],
) -> bool:
    """Whether a product with a bias goes to cuBLASLt (`isInputCompliesAddmmCudaLt`): for a
    contiguous bias of one dimension, a beta of 1, a real dtype and no dimension of size 1."""
    if env.get("DISABLE_ADDMM_CUDA_LT") == "1" or beta != 1.0 or not bias_contiguous:
        return False
    if dtype not in ("float64", "float32", "float16", "bfloat16"):
        return False
    squeezed = [size for size in bias if size != 1]
    one_dimensional = len(bias) == 1 or len(squeezed) == 1
    if not (one_dimensional and bias[-1] == mat2[1]):
        return False
    return min(*mat1, *mat2) > 1


def workspace_requests(
    op: str,
    *,
    lt: bool,
    capability: tuple[int, int],
    env: Mapping[str, str],
) -> list[tuple[str, int]]:
    """Pool (`cublas` or `cublaslt`) and bytes of the workspaces that one non-empty call of an
    operator needs. One is allocated where its (thread, stream, pool) has none yet, and kept.
    """
    if op not in BLAS_OPS:
        return []
    requests = [("cublas", cublas_workspace_bytes(capability, env))]
    if lt and not _lt_shares_workspace(env):
        requests.append(("cublaslt", cublaslt_workspace_bytes(capability, env)))
    return [(pool, size) for pool, size in requests if size]
