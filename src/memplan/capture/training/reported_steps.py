"""Optimizer steps that come without a call of `Optimizer.step`, reported to hooks that count steps.

`memplan.compile` updates each parameter as soon as its gradient is there. It does so only where no
hook of the job's listens to steps; hooks of memplan's own (captures, recordings) are told once all
are updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

UPDATED = "memplan_updated"
"""Keyword of a step that is told: ids of the parameters that it has updated."""
_ALTERING = "memplan.runtime.early."


def others_listen() -> bool:
    """Whether a hook that is not memplan's, or changes what a step does, listens to all steps."""
    return not all(map(_only_looks, (*_pre().values(), *_post().values())))


def tell(optimizers: Iterable[torch.optim.Optimizer], updated: set[int]) -> None:
    """Have memplan's own hooks count a step of each optimizer."""
    for optimizer in optimizers:
        for hooks in (_pre(), _post()):
            for hook in tuple(hooks.values()):
                if _only_looks(hook):
                    hook(optimizer, (), {UPDATED: updated})


def _pre() -> Mapping[int, Any]:
    return _global_optimizer_pre_hooks


def _post() -> Mapping[int, Any]:
    return _global_optimizer_post_hooks


def _only_looks(hook: Any) -> bool:
    module: str = getattr(hook, "__module__", None) or ""
    return module.startswith("memplan.") and not module.startswith(_ALTERING)
