"""Puts a plan's part `low_bit` into effect: moments of Adam in 8 bits, by torchao.

Parameters of 4,096 elements or more are updated by torchao's optimizer, all others by the script's
own. The script keeps its optimizer: schedulers, scalers and checkpoints see the same object with
the same groups, and its `state` holds torchao's tensors. Dettmers et al. (2022), "8-bit Optimizers
via Block-wise Quantization".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from memplan.runtime.instead_of_step import InsteadOfStep, closures_of
from memplan.runtime.one_update import alone, plain_step
from memplan.runtime.optimizer_in_backward.one_parameter import why_not_step
from memplan.runtime.optimizer_in_backward.watched import set_aside
from memplan.runtime.shards import of_parts, part_of, same_parts

_SMALLEST, _BLOCK = 4096, 256
"""Elements of a parameter, and multiples, for which torchao keeps 8 bits; they share a scale."""
_STATE = "OptimState8bit"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LACKING = ("amsgrad", "capturable", "differentiable", "maximize")
"""Options that torchao's optimizers do not have, or fail with (0.18: `amsgrad`)."""


class LowBit(InsteadOfStep):
    """Adam and AdamW of `torch.optim` with moments in 8 bits; a context manager.

    Weights in bf16 are rounded stochastically, but not in jobs of several processes, whose copies
    of a weight would drift apart.
    """

    def __init__(self, on_note: Callable[[str], None] = lambda text: None) -> None:
        """`on_note` is told, in a sentence, why an optimizer's state stays as it is."""
        super().__init__()
        self._on_note = on_note
        self._serves: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._library: Any = None

    def __enter__(self) -> LowBit:
        try:  # before a checkpoint is read: it makes its tensors known to `torch.load`
            import torchao.optim as library
        except ImportError as error:
            self._say(f"torchao cannot be imported ({error}); pip install torchao")
        else:
            self._library = library
            _copied_like_tensors()
        super().__enter__()
        return self

    def _say(self, reason: str) -> None:
        self._on_note(f"an optimizer's state is not in 8 bits: {reason}")

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._can(optimizer):
            return None
        closures = closures_of(args, kwargs)
        if not closures:
            return None
        with torch.enable_grad():
            loss = closures[0]()  # Adam's step begins with it, too
        return (args[0], lambda: loss), {}

    def _can(self, optimizer: Optimizer) -> bool:
        """Asked before every update: one that could be served may have got a hook, a group or a
        scaler since. Its state is then whole again, and stays so."""
        if self._library is None or not self._serves.get(optimizer, True):
            return False
        reason = _why_not(optimizer)
        if reason:
            self._say(reason)
            _make_whole(optimizer)
        self._serves[optimizer] = not reason
        return not reason

    def _make_plain(self, optimizer: Optimizer) -> None:
        if self._serves.pop(optimizer, False):
            _make_whole(optimizer)

    def _update(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
        if torch.compiler.is_compiling() or not self._can(optimizer):
            return False
        gradient = parameter.grad
        assert gradient is not None
        if type(part_of(gradient)) is not Tensor or gradient.layout is not torch.strided:
            return False  # applied in backward, or sparse
        if not _in_blocks(parameter) or not same_parts(parameter, gradient):
            return False
        decoupled = bool(group["decoupled_weight_decay"])
        kind: Any = self._library.AdamW8bit if decoupled else self._library.Adam8bit
        shell: Any = object.__new__(kind)
        # The one way to give torchao a rate is a tensor.
        rate = torch.tensor(group["lr"], dtype=torch.float32)
        shell.__dict__ = {
            **vars(alone(optimizer, {**group, "lr": rate}, parameter)),
            "block_size": _BLOCK,
            "bf16_stochastic_round": not _has_copies(),
            "is_adamw": decoupled,
        }
        with set_aside():
            state = optimizer.state[parameter]
            for name, value in state.items():
                if name != "step" and type(part_of(value)) is Tensor:  # of a plain run's checkpoint
                    state[name] = shell._new_buffer(parameter, name == "exp_avg").copy_(value)
            plain_step(kind)(shell)
        return True


def _why_not(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    if kind not in (Adam, AdamW):
        return f"{kind.__name__} is not Adam or AdamW of torch.optim"
    for option in _LACKING:
        if any(group.get(option) for group in optimizer.param_groups):
            return f"torchao has no {kind.__name__} with {option}=True"
    if hasattr(optimizer, "found_inf"):  # set by a GradScaler while such an optimizer steps
        return f"a fused {kind.__name__} divides gradients by the scaler's scale itself"
    return why_not_step(optimizer)


def _make_whole(optimizer: Optimizer) -> None:
    """State in 8 bits becomes what a plain run has."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                part: Any = part_of(value) if isinstance(value, Tensor) else value
                if type(part).__name__ == _STATE:
                    state[name] = of_parts(part.dequantize(parameter.dtype), parameter)
            if group.get("fused") and "step" in state:  # which counts on the device
                state["step"] = torch.as_tensor(
                    state["step"], dtype=torch.float32, device=parameter.device
                )


def _copied_like_tensors() -> None:
    """`copy.deepcopy` and `clone` of a state, which torchao's class lacks."""
    from torchao.optim.subclass_8bit import OptimState8bit

    @OptimState8bit.implements(torch.ops.aten.clone.default)  # type: ignore[untyped-decorator]
    def clone(_func: Any, _types: Any, args: Any, _kwargs: Any) -> Any:
        one = args[0]
        return OptimState8bit(
            one.codes.clone(), one.scale.clone(), one.qmap.clone(), one.signed, one.dtype
        )


def _in_blocks(parameter: Tensor) -> bool:
    part = part_of(parameter)
    return (
        type(part) in (Tensor, nn.Parameter)
        and part.dtype in _DTYPES
        and part.is_contiguous()
        and part.numel() >= _SMALLEST
        and part.numel() % _BLOCK == 0
    )


def _has_copies() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
