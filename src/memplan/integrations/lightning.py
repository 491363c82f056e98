"""`Trainer(callbacks=[MemplanCallback("job.json")])` for Lightning: figures go to its loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from memplan.integrations.measured import Beside
from memplan.types.estimate import Estimate


class MemplanCallback(Callback):  # type: ignore[misc]  # untyped
    """Measured memory beside the estimate; see `Beside` for the arguments."""

    def __init__(
        self, estimate: Estimate | str | Path, *, every: int = 50, warn_at: float = 0.95
    ) -> None:
        self._beside = Beside(estimate, every, warn_at)
        self._step = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._beside.begin(pl_module.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        self._step = trainer.global_step
        # Not `log_dict`: it drops what falls between two of the Trainer's own logging steps.
        if figures := self._beside.figures(self._step, pl_module.device):
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=self._step)
