"""Optimizers by their names, of which some keep states of 8 bits and some page them."""

from __future__ import annotations

from . import optimizer
from .optimizer import GlobalOptimManager, Optimizer8bit

__all__ = ["GlobalOptimManager", "Optimizer8bit", "optimizer"]


def _family(name: str, states: int) -> None:
    for prefix, is_paged in (("", False), ("Paged", True)):
        for suffix, bits in (("", 0), ("8bit", 8), ("32bit", 32)):
            full = f"{prefix}{name}{suffix}"
            globals()[full] = type(
                full,
                (Optimizer8bit,),
                {"states": states, "bits": bits, "is_paged": is_paged, "__module__": __name__},
            )


for _name, _states in (
    ("Adam", 2),
    ("AdamW", 2),
    ("LAMB", 2),
    ("Lion", 1),
    ("SGD", 1),
    ("RMSprop", 1),
    ("Adagrad", 1),
    ("LARS", 1),
):
    _family(_name, _states)
