"""`memplan.compile`: a training step, run as one graph in the order that needs the least memory.

PyTorch's compiler takes seconds to import, and is when the first step is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch.torch_version import TorchVersion

from memplan.capturing.patches.internals import require
from memplan.types.device import parse_size
from memplan.types.errors import UsageError

if TYPE_CHECKING:
    from memplan.runtime.graph.step import CompiledStep

P = ParamSpec("P")

LEAST = "least"
Budget = int | str | None
"""Bytes; `LEAST` for the smallest budget that can be kept to; None for no recomputation."""

GUARDED_SINCE = "2.13"
"""The first release of PyTorch whose guards see all that a captured step rests on."""


EAGER, INDUCTOR = "eager", "inductor"


@dataclass(frozen=True)
class Options:
    """What `compile`, or the backend of `torch.compile`, was asked for."""

    budget: Budget = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    keep_gradients: bool = False
    order: bool = True
    deadline_seconds: float = 20.0
    seed: int = 0
    codegen: str | None = EAGER

    def check(self, codegens: Sequence[str | None] = (EAGER, INDUCTOR)) -> None:
        """Raises UsageError for values that nothing can be done with."""
        norm, seconds = self.clip_grad_norm, self.deadline_seconds
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise UsageError(f"accumulate={self.accumulate!r}", "calls for one update, such as 4")
        if norm is not None and not (_is_number(norm) and norm > 0):
            raise UsageError(f"clip_grad_norm={norm!r}", "the largest norm, such as 1.0")
        if not (_is_number(seconds) and seconds >= 0):
            raise UsageError(f"deadline_seconds={seconds!r}", "seconds, such as 20")
        for name in ("keep_gradients", "order"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r}", "True or False")
        if type(self.seed) is not int:
            raise UsageError(f"seed={self.seed!r}", "a whole number, such as 0")
        if self.codegen not in codegens:
            raise UsageError(f"codegen={self.codegen!r}", f"{EAGER} or {INDUCTOR}")


def compile(
    loss_fn: Callable[P, torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    budget: int | str | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    keep_gradients: bool = False,
    order: bool = True,
    deadline_seconds: float = 20.0,
    seed: int = 0,
    codegen: str = EAGER,
) -> CompiledStep[P]:
    """A function that trains one step on what `loss_fn` returns, with less memory.

    `step = memplan.compile(loss_fn, optimizer=optimizer)`, then `loss = step(*batch)` instead of::

        optimizer.zero_grad(); loss = loss_fn(*batch); loss.backward(); optimizer.step()

    `loss_fn` returns the loss, a tensor of one number, or a tuple, list or dict in which it is the
    only tensor that requires a gradient; the step returns the same, detached. PyTorch's compiler
    captures it in one graph and sees to it that the graph fits each call; forward, backward and
    each parameter's update by `torch.optim`'s own code then run in the order that needs the least
    memory, each storage freed at its last use. Losses, weights and optimizer state are the same
    bits as in the plain loop. What PyTorch cannot capture in one graph runs plainly, with its
    reason, once.

    `budget`: bytes, or a size such as "8GiB", that the step's storages (weights, optimizer state,
    inputs, gradients, activations) must not exceed, or "least"; activations are recomputed where
    that is needed. `clip_grad_norm`, the largest norm of all gradients together, and `scaler`, of
    mixed precision, want all gradients before the first update. `accumulate`: calls for one update;
    the loss is not divided by it. `keep_gradients` leaves gradients in `.grad` until the next call
    begins; else each is freed after its update. `order=False` leaves the operators in their order;
    `deadline_seconds` is the longest that the search for an order takes, once for each set of
    shapes, and `seed` that of its random choices. `codegen="inductor"` runs the fused kernels of
    PyTorch Inductor: the results differ by rounding, and forward and backward are ordered each for
    itself.

    Raises UsageError for arguments that are none of these; a call raises it where `loss_fn` returns
    no loss, and InfeasibleError for a budget that cannot be met.
    """
    if not callable(loss_fn):
        raise UsageError(f"{type(loss_fn).__name__} is no function", "one that returns the loss")
    optimizers = _checked_optimizers(optimizer)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(f"scaler={scaler!r}", "a torch.amp.GradScaler, or None")
    limit = parse_budget(budget)
    options = Options(
        limit, clip_grad_norm, accumulate, keep_gradients, order, deadline_seconds, seed, codegen
    )
    options.check()
    if TorchVersion(torch.__version__) >= GUARDED_SINCE:  # before, steps run plainly
        require("runtime/graph")
    from memplan.runtime.graph.step import CompiledStep

    return CompiledStep(loss_fn, optimizers, scaler, options)


def _checked_optimizers(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not optimizers:
        raise UsageError("optimizer=[]", "one of torch.optim, or a list of them")
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise UsageError(f"optimizer={type(one).__name__}", "a torch.optim.Optimizer")
        if _wants_closure(one):
            raise UsageError(
                f"{type(one).__name__} calls the loss several times a step",
                "another optimizer, or the plain loop",
            )
    return optimizers


def parse_budget(given: int | str | None) -> Budget:
    """Raises UsageError for what is none."""
    if given is None or given == LEAST:
        return given
    try:
        limit = parse_size(given) if isinstance(given, str) else given
    except UsageError:
        limit = None
    if type(limit) is not int or limit <= 0:
        raise UsageError(f"a budget of {given!r}", 'whole bytes, a size such as "8GiB", or "least"')
    return limit


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the loss itself, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
