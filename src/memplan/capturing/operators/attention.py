"""`scaled_dot_product_attention` on the fake device: the kernel that the real one would take.

PyTorch chooses the kernel in C++ by asking a device that is not there, and would fall back to the
slow math path. Here the choice is made by `kernels.attention`, and the operator of the chosen
kernel is called instead, with its own saved tensors and its own backward.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend

from memplan.capturing.kernels.attention import (
    DEFAULT_ORDER,
    Choice,
    Mask,
    SdpaCall,
    SdpaEnvironment,
    choose_sdpa,
)
from memplan.capturing.kernels.model import version_tuple
from memplan.capturing.patches.attributes import weakly
from memplan.capturing.state import CaptureState, Handler
from memplan.types.device import DeviceProfile
from memplan.types.errors import CaptureError

aten = torch.ops.aten

_HEAD_MULTIPLE = 8
_MASK_MULTIPLE = 8
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "none": SDPBackend.ERROR,
}
_JAGGED = {
    "flash": sdpa._can_use_flash_sdpa_jagged,
    "efficient": sdpa._can_use_efficient_sdpa_jagged,
    "math": sdpa._can_use_math_sdpa_jagged,
}
_PRIORITY = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


class Attention:
    """Chooses and runs attention kernels for one capture."""

    def __init__(self, state: CaptureState, profile: DeviceProfile) -> None:
        self.state = state
        self.profile = profile

    def install(self) -> torch.library.Library:
        """Register the choice below autograd's key for CUDA; returned library must stay alive."""
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", weakly(self.run), "AutogradCUDA")
        return library

    def handler(self) -> Handler:
        """The handler for calls without autograd (inference mode)."""

        def handle(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
            with state.mode:
                return self.run(*args, **kwargs)

        return handle

    def select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        enable_gqa: bool,
    ) -> SDPBackend:
        """Stand-in for PyTorch's choice among the kernels for jagged nested tensors, which goes by
        an order of its own; what follows calls the kernel's operator with all rows.

        Raises CaptureError where it would multiply strided nested tensors.
        """
        order = DEFAULT_ORDER if query.device.type == self.state.device_type else ("math",)
        choice = self.choose(query, key, value, attn_mask, dropout, is_causal, enable_gqa, order)
        if choice.kernel == "math":
            raise CaptureError(
                f"{self.state.source() or 'the script'}: attention over these jagged nested "
                f"tensors takes no kernel of a card ({choice.reason}), and the strided nested "
                "tensors that PyTorch multiplies instead cannot be captured",
                "no empty sequences, and a dtype and head size that a kernel takes; or a padded "
                "batch with a mask",
            )
        self._count(query, choice)
        return _BACKENDS[choice.kernel]

    def _count(self, query: torch.Tensor, choice: Choice) -> None:
        dtype = str(query.dtype).removeprefix("torch.")
        reason = f"{dtype}, head size {query.shape[-1]}: {choice.reason}"
        self.state.kernels["scaled_dot_product_attention", choice.kernel, reason] += 1

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Run attention; the signature is the operator's own."""
        choice = self.choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        self._count(query, choice)
        if choice.kernel in ("math", "none"):
            result: torch.Tensor = aten._scaled_dot_product_attention_math(
                query,
                key,
                value,
                _additive(attn_mask, query),
                dropout_p,
                is_causal,
                None,
                scale=scale,
                enable_gqa=enable_gqa,
            )[0]
            return result
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        bias = _additive(attn_mask, query)
        if choice.kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        needs_lse = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if choice.kernel == "efficient":
            if (
                bias is not None
            ):  # padded before it is expanded: only the mask's own rows are copied
                full = (*query.shape[:-1], key.shape[-2])
                bias = _aligned(bias, tuple(bias.shape)).expand(full)
            return _first(
                aten._scaled_dot_product_efficient_attention(
                    query, key, value, bias, needs_lse, dropout_p, is_causal, scale=scale
                )
            )
        return _first(
            aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, needs_lse, dropout_p, is_causal, False, scale=scale
            )
        )

    def choose(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        enable_gqa: bool,
        order: tuple[str, ...] | None = None,
    ) -> Choice:
        """Choose the kernel by the table, with the switches in force; `order` before theirs."""
        dtypes = [str(t.dtype).removeprefix("torch.") for t in (query, key, value)]
        call = SdpaCall(
            q=_sizes(query),
            k=_sizes(key),
            v=_sizes(value),
            dtype=dtypes[0],
            kv_dtypes=(dtypes[1], dtypes[2]),
            mask=None
            if mask is None
            else Mask(
                tuple(mask.shape),
                str(mask.dtype).removeprefix("torch."),
                mask.requires_grad,
                mask.stride(-1) == 1 or mask.shape[-1] == 1,
            ),
            dropout_p=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            requires_grad=torch.is_grad_enabled()
            and any(t.requires_grad for t in (query, key, value)),
            last_strides_one=all(t.stride(-1) == 1 for t in (query, key, value)),
            not_jagged=_not_jagged(query, key, value, is_causal),
        )
        return choose_sdpa(call, self._environment(order))

    def _environment(self, order: tuple[str, ...] | None) -> SdpaEnvironment:
        backends = torch.backends.cuda
        switches = {
            "flash": backends.flash_sdp_enabled(),
            "efficient": backends.mem_efficient_sdp_enabled(),
            "math": backends.math_sdp_enabled(),
            "cudnn": backends.cudnn_sdp_enabled(),
        }
        return SdpaEnvironment(
            capability=self.profile.capability,
            torch_version=version_tuple(torch.__version__),
            enabled=frozenset(name for name, on in switches.items() if on),
            priority=order or _priority(),
            deterministic=torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_deprioritized=os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1",
        )


def _priority() -> tuple[str, ...] | None:
    """The order that the script has set with `sdpa_kernel(..., set_priority=True)`, if it has."""
    order = tuple(
        _PRIORITY[number] for number in torch._C._get_sdp_priority_order() if number in _PRIORITY
    )
    return None if order[: len(DEFAULT_ORDER)] == DEFAULT_ORDER else order


def _not_jagged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> frozenset[str]:
    """Kernels that PyTorch's own checks of jagged nested tensors, beside the usual ones, refuse."""
    if query.layout is not torch.jagged or query.dim() != 4:
        return frozenset()
    call: Any = SimpleNamespace(query=query, key=key, value=value, is_causal=is_causal)
    return frozenset(name for name, may_take in _JAGGED.items() if not may_take(call))


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is not torch.jagged:
        return tuple(tensor.shape)
    return (tensor.shape[0], *tensor.values().shape)  # the rows of all sequences in one dimension


def _first(result: Any) -> torch.Tensor:
    output: torch.Tensor = result[0]
    return output


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    head = query.shape[-1]
    missing = -head % _HEAD_MULTIPLE
    if missing:
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    output = _first(
        aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    )
    return output[..., :head] if missing else output


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask as one that is added to the scores, in the query's dtype."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, float("-inf"))


def _aligned(bias: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A bias whose rows begin at multiples of 8 columns, as the kernel needs it
    (`preprocess_mask`): others are padded, and sliced back. (Not for 1,000 columns, PyTorch 2.11 on
    an H200.)"""
    *strides, last = bias.stride()
    if last == 1 and not any(stride % _MASK_MULTIPLE for stride in strides):
        return bias
    missing = _MASK_MULTIPLE - shape[-1] % _MASK_MULTIPLE
    return F.pad(bias, (0, missing))[..., : shape[-1]]
