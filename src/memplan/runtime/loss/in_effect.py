"""Puts a plan's part `loss` into effect: the heads it names give `Logits`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import memplan.runtime.loss.operators  # noqa: F401  (what may be done to logits)
from memplan.capturing.patches.attributes import Patches
from memplan.runtime.loss.logits import deferred
from memplan.runtime.loss.rows import Head
from memplan.runtime.tape.storages import is_plain
from memplan.types.plan import LossPart


class ChunkedLoss:
    """In effect while it is entered, on `torch.nn.functional.linear`, which `nn.Linear` calls.

    Where gradients are off, in compiled code and in backward (a checkpointed block that runs
    again), a head gives plain logits.
    """

    def __init__(self, part: LossPart) -> None:
        self._heads = {(head.classes, head.features) for head in part.heads}
        self._rows = part.rows
        self._patches = Patches()
        self._plain: Any = None

    def __enter__(self) -> ChunkedLoss:
        self._plain = self._patches.set(torch.nn.functional, "linear", self._linear)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._patches.undo()

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling() and self._is_head(input, weight):
            return deferred(Head(weight, bias, self._rows), input)
        result: Tensor = self._plain(input, weight, bias)
        return result

    def _is_head(self, features: Tensor, weight: Tensor) -> bool:
        return (
            tuple(weight.shape) in self._heads
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
            and is_plain(features)
            and is_plain(weight)
            and features.dim() > 1
            and features.numel() > self._rows * features.shape[-1]
        )
