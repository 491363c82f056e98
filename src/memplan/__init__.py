"""memplan: know, before you train, how much GPU memory a PyTorch job needs.

`memplan.estimate(step)` and `with memplan.capture() as c:` are the Python side of the command
line; see `memplan.api`, which is imported when one of its functions is asked for.
`memplan.auto_checkpoint(module, *sample)` makes a module need less memory in training.
`memplan.compile(loss_fn, optimizer=…)` runs training steps in the order of the least peak.
`memplan.install(plan)` and `with memplan.planned(plan):` serve a process's CUDA memory by plan.
`memplan.register_rule(name)` says what an operator that only a GPU runs takes of its memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.api import auto_checkpoint as auto_checkpoint
    from memplan.api import capture as capture
    from memplan.api import compile as compile
    from memplan.api import estimate as estimate
    from memplan.api import install as install
    from memplan.api import planned as planned
    from memplan.api import prepare as prepare
    from memplan.api import read_estimate as read_estimate
    from memplan.api import register_rule as register_rule

__version__ = "0.1.0"
_OF_THE_API = ("auto_checkpoint", "capture", "compile", "estimate", "install", "planned",
               "prepare", "read_estimate", "register_rule")  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _OF_THE_API:
        return getattr(importlib.import_module("memplan.api"), name)
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext memplan`: the magic `%%memplan`."""
    importlib.import_module("memplan.integrations.notebook").load(shell)
