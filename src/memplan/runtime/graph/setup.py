"""What a compiled step is made with, and what follows from it for its graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memplan.runtime.graph.compile import Options
from memplan.runtime.graph.updates import Updates


@dataclass(frozen=True, eq=False)
class Setup:
    updates: Updates
    scaler: torch.amp.GradScaler | None
    options: Options

    def updates_in_graph(self) -> bool:
        """Whether graphs update parameters; else the optimizers' step comes after them."""
        by_itself = self.scaler is None and self.options.clip_grad_norm is None
        return by_itself and self.updates.each_by_itself()

    def keeps_gradients(self) -> bool:
        """Whether graphs give new gradients, which stay in `.grad`."""
        if self.options.accumulate > 1:
            return False  # they are added to those that are there
        return self.options.keep_gradients or not self.updates_in_graph()

    def resident_blocks(self) -> list[int]:
        """Bytes of optimizer state, of a scaler's two numbers and of gradients of earlier calls, by
        block."""
        parameters = {id(one): one for one in self.updates.parameters()}.values()
        state = [self.updates.state_bytes(one)[0] for one in parameters]
        gradients = [one.numel() * one.element_size() for one in parameters]
        numbers = [] if self.scaler is None else [4, 4]
        return [*state, *numbers, *(gradients if self.options.accumulate > 1 else [])]

    def scratch_after_bytes(self) -> int:
        """Bytes that the optimizers' step allocates and frees where it comes after a graph."""
        return 0 if self.updates_in_graph() else self.updates.step_scratch_bytes()
