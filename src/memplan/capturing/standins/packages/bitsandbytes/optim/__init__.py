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
        defaults = {"lr": lr, "weight_decay": options.get("weight_decay", 0.0)}
        super().__init__(params, defaults)
        self.is_paged = bool(options.get("is_paged", self.is_paged))
        self.optim_bits = 8 if self.bits == 8 else int(options.get("optim_bits", 32))
        self.min_8bit_size = int(options.get("min_8bit_size", _LEAST))
        self._codes: list[torch.Tensor] = []

    def _buffer(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.is_paged or p.numel() < _PAGED_FROM:
            return torch.zeros_like(p, dtype=dtype)
        return paged(*p.shape, dtype=dtype, device=p.device)

    def _init_state(self, p: torch.Tensor) -> None:
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
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self._init_state(p)
                self.state[p]["step"] += 1
                held = [v for v in self.state[p].values() if isinstance(v, torch.Tensor)]
                gradient = p.grad.contiguous()
                record("bitsandbytes.optimizer_update", [gradient, p, *held], [p, *held])
        if self.is_paged:
            torch.cuda.synchronize()
        return loss


def _family(name: str, states: int) -> None:
    for prefix, is_paged in (("", False), ("Paged", True)):
        for suffix, bits in (("", 0), ("8bit", 8), ("32bit", 32)):
            full = f"{prefix}{name}{suffix}"
            globals()[full] = type(
                full,
                (Optimizer8bit,),
                {"states": states, "bits": bits, "is_paged": is_paged, "__module__": __name__},
            )


for _name, _states in (
    ("Adam", 2),
    ("AdamW", 2),
    ("LAMB", 2),
    ("Lion", 1),
    ("SGD", 1),
    ("RMSprop", 1),
    ("Adagrad", 1),
    ("LARS", 1),
):
    _family(_name, _states)
