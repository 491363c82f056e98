"""Fused optimizers: fp32 states, and kernels over lists of tensors that allocate nothing.

Source: NVIDIA/apex, `apex/optimizers/fused_adam.py`, `fused_sgd.py`, `fused_lamb.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.launch import record


class _Fused(torch.optim.Optimizer):
    """States of `names` for each parameter, made at the first step."""

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    state_dtype: torch.dtype | None = torch.float32
    """None: the parameter's own."""

    def __init__(self, params: Any, lr: float = 1e-3, *_args: Any, **options: Any) -> None:
        self.master_weights = bool(options.get("master_weights", False))
        self.set_grad_none = bool(options.get("set_grad_none", True))
        self.momentum = float(options.get("momentum", 0.0))
        defaults = {"lr": lr, "weight_decay": options.get("weight_decay", 0.0)}
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=self.set_grad_none and set_to_none)

    def _wanted(self) -> tuple[str, ...]:
        return self.names

    @torch.no_grad()
    def step(self, closure: Any = None, **_more: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                for name in self._wanted():
                    if name not in state:
                        state[name] = torch.zeros_like(p, dtype=self.state_dtype or p.dtype)
                if self.master_weights and "master_param" not in state:
                    state["master_param"] = p.detach().clone().float()
                gradients.append(p.grad)
                held += [p, *(v for v in state.values() if isinstance(v, torch.Tensor))]
        record("apex.multi_tensor_apply", [*gradients, *held], held)
        return loss


class FusedAdam(_Fused):
    """Two fp32 states a parameter."""


class FusedLAMB(_Fused):
    """Two fp32 states a parameter."""


class FusedAdagrad(_Fused):
    """One fp32 state a parameter."""

    names = ("sum",)


class FusedNovoGrad(_Fused):
    """One state a parameter; the second is one number."""

    names = ("exp_avg",)


class FusedSGD(_Fused):
    """The momentum, in the parameter's dtype; none without momentum."""

    names = ("momentum_buffer",)
    state_dtype = None

    def _wanted(self) -> tuple[str, ...]:
        return self.names if self.momentum else ()
