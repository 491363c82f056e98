"""Every model that is measured, by name: `CASES`; `build` seeds and makes one."""

from __future__ import annotations

import torch

from bench.recompute import convnets, transformers
from bench.recompute.case import Case, Training

CASES: dict[str, Case] = {case.name: case for case in convnets.CASES + transformers.CASES}
SEED = 1729


def build(name: str) -> Training:
    """The model called `name`, in training mode, with its batch, all from one seed."""
    torch.manual_seed(SEED)
    training = CASES[name].build()
    training.module.train()
    return training
