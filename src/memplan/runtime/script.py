"""Runs a user's program with a plan in effect, as `python SCRIPT` would run it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from memplan.runtime.in_effect import plan_in_effect
from memplan.types.plan import Plan


def run_program(
    kind: Literal["script", "module"],
    name: str,
    argv: tuple[str, ...],
    plan: Plan,
    on_note: Callable[[str], None],
) -> None:
    """Run it to its end; whatever it raises passes through."""
    with plan_in_effect(plan, [name, *argv], on_note):
        sys.argv = [name, *argv]
        if kind == "module":
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
