"""Operators that a step leaves out on a condition: a `GradScaler` skips the update where a gradient
is not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.patching import Patches
from memplan.runtime.compiled.recording import Recorder
from memplan.runtime.compiled.scalars import scalar_of


@functools.cache
def unless(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a condition in front: where it is true, nothing is done and None returned."""

    def gated(skip: float, *args: Any, **kwargs: Any) -> Any:
        return None if skip else function(*args, **kwargs)

    gated.__name__ = "unless_" + str(function).replace(".", "_").split(" ")[-1].strip("<>")
    return gated


def watch_scaler(recorder: Recorder, patches: Patches) -> None:
    """Until the patches are undone, what `GradScaler.step` skips or not is recorded as gated."""

    def maybe_step(
        self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = sum(value.item() for value in optimizer_state["found_inf_per_device"].values())
        scalar = scalar_of(found)
        if scalar is None or scalar.node is None or recorder.refusal is not None:
            return None if found else optimizer.step(*args, **kwargs)
        if scalar.value:
            recorder.refuse(
                NotCapturable(
                    "the scaler found a gradient that is not finite and left out the update",
                    refused_at(),
                    later=True,
                )
            )
            return None
        with recorder.graph.gated(scalar.node, unless):
            return optimizer.step(*args, **kwargs)

    patches.replace(torch.amp.GradScaler, "_maybe_opt_step", maybe_step)
