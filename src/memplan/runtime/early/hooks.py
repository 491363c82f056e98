"""Where early updates take hold of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

RunEngine = Callable[..., Any]
_RUN = "_engine_run_backward"


@contextmanager
def hooked(
    run_backward: Callable[[RunEngine], RunEngine],
    group_added: Callable[[Optimizer], None],
    before_step: Callable[..., None],
    after_step: Callable[..., None],
) -> Iterator[None]:
    """`run_backward` is given what calls the engine and returns what is called in its stead, for
    the engine has no hook for the beginning and end of a pass; nor have optimizers one for groups
    of parameters."""
    run, add = vars(torch.autograd)[_RUN], Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
        add(optimizer, param_group)
        group_added(optimizer)

    before = register_optimizer_step_pre_hook(before_step)
    after = register_optimizer_step_post_hook(after_step)
    setattr(torch.autograd, _RUN, run_backward(run))
    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        setattr(torch.autograd, _RUN, run)
        Optimizer.add_param_group = add  # type: ignore[method-assign]
        before.remove()
        after.remove()
