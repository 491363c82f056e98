"""Stand-in for the compiled part of mamba-ssm: the scan of the first Mamba.

Source: mamba-ssm 2.3.2, `csrc/selective_scan/selective_scan.cpp`. The second Mamba's kernels are
Triton's, and its own Python allocates for them.
"""

from __future__ import annotations

import torch

from memplan.capturing.kernels.model import ceil_div
from memplan.capturing.standins.extension_names import Extension
from memplan.capturing.standins.rules import Call

_rule = Extension("selective_scan_cuda", "mamba-ssm 2.3.2, csrc/selective_scan/selective_scan.cpp")
_CHUNK = 2048
Maybe = torch.Tensor | None


@_rule
def fwd(
    call: Call,
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Maybe,
    z: Maybe,
    delta_bias: Maybe,
    delta_softplus: bool,
) -> list[torch.Tensor]:
    """Output, states at the ends of chunks, and the gated output."""
    gated = [] if z is None else [torch.empty_like(z)]
    batch, channels, length = u.shape
    states = (batch, channels, ceil_div(length, _CHUNK), 2 * a.shape[1])
    out = torch.empty_like(delta)
    return [out, u.new_empty(states, dtype=a.dtype), *gated]


@_rule
def bwd(
    call: Call,
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Maybe,
    z: Maybe,
    delta_bias: Maybe,
    grad: torch.Tensor,
    states: Maybe,
    out: Maybe,
    z_grad: Maybe,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[torch.Tensor | None]:
    """Gradients of all inputs, and the gated output where it is wanted again."""
    of_z = [] if z is None else [torch.empty_like(z) if z_grad is None else z_grad]
    if z is not None and recompute_out_z and out is not None:
        of_z.append(torch.empty_like(out))
    of_u, of_delta, of_a = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)
    sums = [_sum(item) for item in (b, c)]
    rest = [None if item is None else torch.zeros_like(item) for item in (d, delta_bias)]
    of_b, of_c = (total.to(item.dtype) for total, item in zip(sums, (b, c), strict=True))
    return [of_u, of_delta, of_a, of_b, of_c, *rest, *of_z]


def _sum(item: torch.Tensor) -> torch.Tensor:
    """Gradients of what varies with time are summed in fp32."""
    varies = item.dim() > 2
    return torch.zeros_like(item, dtype=torch.float32 if varies else item.dtype)
