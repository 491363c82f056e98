"""Which kernel `scaled_dot_product_attention` takes on a CUDA device, by PyTorch's own checks.

Source: pytorch `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`select_sdp_backend`,
`can_use_{flash,mem_efficient,cudnn}_attention`) and `transformers/sdp_utils_cpp.h`, releases 2.11
to 2.13, CUDA builds for Linux. Strided nested tensors and float8 are not covered. See
docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memplan.capturing.kernels.model import HALF, Shape

DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
CUDNN_FIRST_ORDER = ("cudnn", "flash", "efficient", "math")
ALL_KERNELS = frozenset(DEFAULT_ORDER)
_NEWEST_SUPPORTED = (12, 1)


@dataclass(frozen=True)
class Mask:
    """An `attn_mask` argument."""

    shape: Shape
    dtype: str
    requires_grad: bool = False
    last_stride_one: bool = True


@dataclass(frozen=True)
class SdpaCall:
    """Arguments of one call. Shapes are (batch, heads, sequence, head size)."""

    q: Shape
    k: Shape
    v: Shape
    dtype: str
    kv_dtypes: tuple[str, str] | None = None
    """Dtypes of key and value; None: as the query's."""
    mask: Mask | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    requires_grad: bool = False
    """Grad mode is on and one of query, key, value requires grad."""
    last_strides_one: bool = True
    """The last dimension of query, key and value has stride 1."""
    not_jagged: frozenset[str] = frozenset()
    """Kernels that PyTorch does not take for these jagged nested tensors."""


@dataclass(frozen=True)
class SdpaEnvironment:
    """What else decides: the device, the versions and the switches in force."""

    capability: tuple[int, int]
    torch_version: tuple[int, int, int] = (2, 13, 0)
    enabled: frozenset[str] = ALL_KERNELS
    """`torch.backends.cuda.*_sdp_enabled()`, `sdpa_kernel(…)`."""
    priority: Sequence[str] | None = None
    """Order set by `sdpa_kernel(…, set_priority=True)`; None: the default order."""
    deterministic: bool = False
    """`use_deterministic_algorithms(True)` without warn_only."""
    cudnn_deprioritized: bool = False
    """Environment variable TORCH_CUDNN_SDPA_DEPRIORITIZED."""


@dataclass(frozen=True)
class Choice:
    """The kernel taken: `flash`, `efficient`, `cudnn`, `math`, or `none` (PyTorch would raise)."""

    kernel: str
    reason: str
    """Also why each kernel tried before was not taken."""


_Check = Callable[[SdpaCall, SdpaEnvironment], str]
"""Returns why the kernel cannot run, or the empty string."""


def wheel_cudnn_version(torch_version: Sequence[int]) -> int:
    """cuDNN of a release's default wheel, as `torch.backends.cudnn.version()` would say."""
    return 92000 if tuple(torch_version[:2]) >= (2, 12) else 91900


def prefers_cudnn(env: SdpaEnvironment) -> bool:
    """True where PyTorch puts cuDNN before flash (`check_prefer_cudnn_attention`): capability 9.x
    or 10.x in the default wheels, unless deprioritized by the environment. Builds against CUDA 12
    do so only for 9.0, 9.3, 10.0 and 10.3."""
    return env.capability[0] in (9, 10) and not env.cudnn_deprioritized


def priority_order(env: SdpaEnvironment) -> tuple[str, ...]:
    if env.priority is not None:
        return tuple(env.priority)
    return CUDNN_FIRST_ORDER if prefers_cudnn(env) else DEFAULT_ORDER


def choose_sdpa(call: SdpaCall, env: SdpaEnvironment) -> Choice:
    """The first kernel in priority order whose checks all pass."""
    rejected: dict[str, str] = {}
    for kernel in priority_order(env):
        why_not = reject(kernel, call, env)
        if not why_not:
            return Choice(kernel, _reason(kernel, rejected))
        rejected[kernel] = why_not
    return Choice("none", _reason("none", rejected))


def reject(kernel: str, call: SdpaCall, env: SdpaEnvironment) -> str:
    """Why `kernel` cannot run this call; empty when it can."""
    if kernel not in env.enabled:
        return "disabled at run time"
    if kernel in call.not_jagged:
        return "not for these jagged tensors"
    return next((why for check in _CHECKS[kernel] if (why := check(call, env))), "")


def _reason(kernel: str, rejected: dict[str, str]) -> str:
    if not rejected:
        return "first in order, every check passes"
    return "; ".join(f"not {name}: {why}" for name, why in rejected.items())


def _four_dimensional(call: SdpaCall, env: SdpaEnvironment) -> str:
    if len(call.q) == len(call.k) == len(call.v) == 4:
        return ""
    return "query, key and value are not 4-dimensional"


def _no_mask(call: SdpaCall, env: SdpaEnvironment) -> str:
    return "an attention mask is given" if call.mask is not None else ""


def _flash_head_size(call: SdpaCall, env: SdpaEnvironment) -> str:
    if not call.q[-1] == call.k[-1] == call.v[-1]:
        return "head sizes of query, key and value differ"
    return "head size above 256" if call.q[-1] > 256 else ""


def _flash_hardware(call: SdpaCall, env: SdpaEnvironment) -> str:
    return _capability_within(env, (8, 0))


def _efficient_hardware(call: SdpaCall, env: SdpaEnvironment) -> str:
    return _capability_within(env, (5, 0))


def _capability_within(env: SdpaEnvironment, oldest: tuple[int, int]) -> str:
    if oldest <= env.capability <= _NEWEST_SUPPORTED:
        return ""
    low, high = ("sm{}{}".format(*cap) for cap in (oldest, _NEWEST_SUPPORTED))
    return f"compute capability {env.capability[0]}.{env.capability[1]} is outside {low} to {high}"


def _flash_backward_head_size(call: SdpaCall, env: SdpaEnvironment) -> str:
    """The backward kernel needs more shared memory than the smaller chips have."""
    small = (8, 6) <= env.capability <= (8, 9) or (12, 0) <= env.capability <= (12, 1)
    size = call.q[-1]
    if not (call.requires_grad and small) or size <= 192:
        return ""
    if size <= 224:
        return "no backward for head sizes 193 to 224 on this capability"
    if call.dropout_p > 0.0:
        return "no backward with dropout for head sizes above 224 on this capability"
    return ""


def _square_if_causal(call: SdpaCall, env: SdpaEnvironment) -> str:
    if call.is_causal and call.q[-2] != call.k[-2]:
        return "causal with different query and key lengths"
    return ""


def _dtype_in(call: SdpaCall, allowed: frozenset[str]) -> str:
    key, value = call.kv_dtypes or (call.dtype, call.dtype)
    if not call.dtype == key == value:
        return "query, key and value have different dtypes"
    return "" if call.dtype in allowed else f"dtype {call.dtype}"


def _half_precision(call: SdpaCall, env: SdpaEnvironment) -> str:
    return _dtype_in(call, HALF if env.capability >= (8, 0) else frozenset({"float16"}))


def _efficient_dtype(call: SdpaCall, env: SdpaEnvironment) -> str:
    allowed = {"float16", "float32"} | ({"bfloat16"} if env.capability >= (8, 0) else set())
    return _dtype_in(call, frozenset(allowed))


def _same_batch(call: SdpaCall, env: SdpaEnvironment) -> str:
    if call.q[0] == call.k[0] == call.v[0]:
        return ""
    return "batch sizes of query, key and value differ"


def _heads_grouped(call: SdpaCall, env: SdpaEnvironment) -> str:
    """Same number of heads, or with enable_gqa a number of key/value heads that divides it."""
    if not call.enable_gqa:
        return _heads_equal(call, env)
    if call.k[1] != call.v[1]:
        return "key and value have different numbers of heads"
    return "" if call.q[1] % call.k[1] == 0 else "key heads do not divide query heads"


def _heads_grouped_cudnn(call: SdpaCall, env: SdpaEnvironment) -> str:
    if not call.enable_gqa:
        return _heads_equal(call, env)
    divide = call.q[1] % call.k[1] == 0 and call.q[1] % call.v[1] == 0
    return "" if divide else "key or value heads do not divide query heads"


def _heads_equal(call: SdpaCall, env: SdpaEnvironment) -> str:
    if call.q[1] == call.k[1] == call.v[1]:
        return ""
    return "numbers of heads of query, key and value differ"


def _heads_efficient(call: SdpaCall, env: SdpaEnvironment) -> str:
    # Grouped queries reached this kernel after 2.13.
    return (_heads_grouped if env.torch_version >= (2, 14) else _heads_equal)(call, env)


def _sequences_not_empty(call: SdpaCall, env: SdpaEnvironment) -> str:
    return "" if call.q[-2] and call.k[-2] else "empty query or key sequence"


def _last_strides(call: SdpaCall, env: SdpaEnvironment) -> str:
    if not call.last_strides_one and call.q[-1] != 1:
        return "the last dimension of query, key or value has a stride other than 1"
    return _mask_stride(call)


def _last_strides_strict(call: SdpaCall, env: SdpaEnvironment) -> str:
    if not call.last_strides_one:
        return "the last dimension of query, key or value has a stride other than 1"
    return _mask_stride(call)


def _mask_stride(call: SdpaCall) -> str:
    if call.mask is not None and not call.mask.last_stride_one:
        return "the last dimension of the mask has a stride other than 1"
    return ""


def head_alignment(dtype: str, capability: tuple[int, int]) -> int:
    """Elements that a head size must be a multiple of (`minimum_gemm_alignment`)."""
    half = dtype in HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    least = 4 if capability >= (8, 0) else 1
    return max(least, 128 // (16 if half else 32)) if tensor_cores else least


def _efficient_head_size(call: SdpaCall, env: SdpaEnvironment) -> str:
    if call.q[-1] != call.k[-1]:
        return "head sizes of query and key differ"
    alignment = head_alignment(call.dtype, env.capability)
    if min(call.q[-1], call.v[-1]) <= 0 or call.q[-1] % alignment or call.v[-1] % alignment:
        return f"a head size is not a multiple of {alignment}"
    return ""


def _mask_shape(call: SdpaCall, env: SdpaEnvironment) -> str:
    mask = call.mask
    if mask is None:
        return ""
    if mask.requires_grad:
        return "the mask requires grad"
    if len(mask.shape) not in (2, 4):
        return "the mask is neither 2- nor 4-dimensional"
    full = (call.q[0], call.q[1], call.q[2], call.k[2])[-len(mask.shape) :]
    if any(size not in (1, want) for size, want in zip(mask.shape, full, strict=True)):
        return "the mask's shape does not broadcast"
    return ""


def _cudnn_deterministic(call: SdpaCall, env: SdpaEnvironment) -> str:
    return "not deterministic" if env.deterministic else ""


def _cudnn_dropout(call: SdpaCall, env: SdpaEnvironment) -> str:
    if env.torch_version >= (2, 14) and (call.dropout_p * 16) % 1 != 0:
        return "dropout probability is not a multiple of 1/16"
    return ""


def cudnn_head_size_limit(call: SdpaCall, env: SdpaEnvironment) -> int:
    """Largest head size of the cuDNN kernel for this call, with the default wheel's cuDNN."""
    hopper = env.capability == (9, 0)
    if hopper and env.torch_version < (2, 14):
        return 256
    deepseek = call.q[-1] == 192 and call.v[-1] == 128
    return 192 if deepseek and (hopper or env.capability[0] == 10) else 128


def _cudnn_shapes(call: SdpaCall, env: SdpaEnvironment) -> str:
    limit = cudnn_head_size_limit(call, env)
    if max(call.q[-1], call.v[-1]) > limit:
        return f"head size above {limit}"
    if call.q[-1] % 8 or call.v[-1] % 8:
        return "a head size is not a multiple of 8"
    if call.k[-2] == 1:
        return "key sequence of length 1"
    if call.q[-2] == 1 and call.dropout_p > 0.0:
        return "query sequence of length 1"
    return ""


_CHECKS: dict[str, tuple[_Check, ...]] = {
    "flash": (
        _four_dimensional,
        _no_mask,
        _flash_head_size,
        _flash_hardware,
        _flash_backward_head_size,
        _square_if_causal,
        _half_precision,
        _same_batch,
        _heads_grouped,
        _sequences_not_empty,
        _last_strides,
    ),
    "efficient": (
        _efficient_hardware,
        _four_dimensional,
        _efficient_head_size,
        _sequences_not_empty,
        _last_strides_strict,
        _same_batch,
        _heads_efficient,
        _efficient_dtype,
    ),
    "cudnn": (
        _cudnn_dropout,
        _four_dimensional,
        _cudnn_deterministic,
        _half_precision,
        _mask_shape,
        _flash_hardware,
        _sequences_not_empty,
        _last_strides,
        _same_batch,
        _heads_grouped_cudnn,
        _cudnn_shapes,
    ),
    "math": (),
}
