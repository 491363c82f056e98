"""Optimizers with states of 8 bits: a byte a value and one fp32 maximum for each 256 of them.

Tensors of fewer than 4,096 values keep fp32 states. Source: bitsandbytes 0.50.2,
`optim/optimizer.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.kernels.bitsandbytes import paged
from memplan.capturing.standins.launch import record

_BLOCK = 256
_PAGED_FROM = 100_000
_LEAST = 4096
_CODE = 256


class GlobalOptimManager:
    """Which parameters keep states of 32 bits."""

    _instance: GlobalOptimManager | None = None

    def __init__(self) -> None:
        self.module_weight_config_triple: list[tuple[torch.nn.Module, str, dict[str, Any]]] = []
        self._own: dict[int, dict[str, Any]] = {}

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def register_module_override(
        self, module: torch.nn.Module, param_name: str, config: dict[str, Any]
    ) -> None:
        self.module_weight_config_triple.append((module, param_name, config))

    def register_parameters(self, params: Any) -> None:
        """Parameters are known by themselves."""

    def override_config(
        self, parameters: Any, key: Any = None, value: Any = None, key_value_dict: Any = None
    ) -> None:
        config = key_value_dict or {key: value}
        for one in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            self._own.setdefault(id(one), {}).update(config)

    def config_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        found = dict(self._own.get(id(parameter), {}))
        for module, name, config in self.module_weight_config_triple:
            if getattr(module, name, None) is parameter:
                found.update(config)
        return found


class Optimizer8bit(torch.optim.Optimizer):
    """All optimizers of the package: they differ in how many states they have."""

    states = 2
    bits = 32
    is_paged = False

    def __init__(self, params: Any, lr: float = 1e-3, *_args: Any, **options: Any) -> None:
        usual = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        given = {name: options.get(name, value) for name, value in usual.items()}
        super().__init__(params, {"lr": lr, **given})
        self.is_paged = bool(options.get("is_paged", self.is_paged))
        self.optim_bits = 8 if self.bits == 8 else int(options.get("optim_bits", 32))
        self.min_8bit_size = int(options.get("min_8bit_size", _LEAST))
        self.initialized = True
        self._codes: list[torch.Tensor] = []

    def to_gpu(self) -> None:
        """States are made where their parameters are."""

    check_overrides = to_gpu

    def prefetch_state(self, p: torch.Tensor) -> None:
        """Paged states come by themselves."""

    def _buffer(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.is_paged or p.numel() < _PAGED_FROM:
            return torch.zeros_like(p, dtype=dtype)
        return paged(*p.shape, dtype=dtype, device=p.device)

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Make the states of one parameter."""
        state = self.state[p]
        config = GlobalOptimManager.get_instance().config_of(p)
        bits = int(config.get("optim_bits", self.optim_bits))
        small = p.numel() < int(config.get("min_8bit_size", self.min_8bit_size))
        eight = bits == 8 and not small
        state["step"] = 0
        if eight and not self._codes:
            self._codes = [torch.zeros(_CODE).to(p.device) for _ in range(self.states)]
        for number in range(1, self.states + 1):
            state[f"state{number}"] = self._buffer(p, torch.uint8 if eight else torch.float32)
            if eight:
                state[f"qmap{number}"] = self._codes[number - 1]
        for number in range(1, self.states + 1):
            if eight:
                blocks = -(-p.numel() // _BLOCK)
                state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; the kernel allocates nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for gindex, group in enumerate(self.param_groups):
            for pindex, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if "state1" not in self.state[p]:
                    self.init_state(group, p, gindex, pindex)
                self.update_step(group, p, gindex, pindex)
        if self.is_paged:
            torch.cuda.synchronize()
        return loss

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter by its gradient and its states."""
        assert p.grad is not None
        self.state[p]["step"] += 1
        held = [v for v in self.state[p].values() if isinstance(v, torch.Tensor)]
        gradient = p.grad.contiguous()
        record("bitsandbytes.optimizer_update", [gradient, p, *held], [p, *held])


class Optimizer2State(Optimizer8bit):
    """What optimizers of other packages are made of: they give the algorithm's name first."""

    def __init__(
        self,
        optimizer_name: str,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = _LEAST,
        *_args: Any,
        **options: Any,
    ) -> None:
        options |= {"optim_bits": optim_bits, "min_8bit_size": min_8bit_size}
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)


class Optimizer1State(Optimizer2State):
    """The same with one state."""

    states = 1
