"""`trainer.add_callback(MemplanCallback(trainer, "job.json"))` for Hugging Face's Trainer, and
`watch(accelerator, optimizer, "job.json")` for a loop on Accelerate.

The figures go where the framework's own go: to whatever `report_to` and `log_with` name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from memplan.integrations.measured import Beside
from memplan.types.estimate import Estimate

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class MemplanCallback(TrainerCallback):  # type: ignore[misc]  # untyped
    """Measured memory beside the estimate in `trainer.log`; see `Beside` for the arguments."""

    def __init__(
        self,
        trainer: Any,
        estimate: Estimate | str | Path,
        *,
        every: int = 50,
        warn_at: float = 0.95,
    ) -> None:
        self._trainer = trainer
        self._beside = Beside(estimate, every, warn_at)

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        self._beside.begin(args.device)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if figures := self._beside.figures(state.global_step, args.device):
            self._trainer.log(figures)


def watch(
    accelerator: Any,
    optimizer: Any,
    estimate: Estimate | str | Path,
    *,
    every: int = 50,
    warn_at: float = 0.95,
) -> RemovableHandle:
    """Measured memory beside the estimate in `accelerator.log`, from each N-th step of a prepared
    `optimizer` on; `remove()` of what is returned ends it. See `Beside` for the arguments."""
    beside = Beside(estimate, every, warn_at)
    beside.begin(accelerator.device)
    steps = 0

    def stepped(*_: object) -> None:
        nonlocal steps
        steps += 1
        if figures := beside.figures(steps, accelerator.device):
            accelerator.log(figures, step=steps)

    return optimizer.optimizer.register_step_post_hook(stepped)  # type: ignore[no-any-return]
