"""What must hold for updates in backward: around a backward pass, in what it is asked for, and in
the job's own source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.capturing.patches.deferred_dynamo import has_compiled
from memplan.runtime.optimizer_in_backward.one_parameter import (
    share_memory,
    why_not,
    why_not_replaced,
)
from memplan.runtime.shards import part_of
from memplan.types.installed import is_installed

_MOST_BYTES = 4 << 20
_OURS = str(Path(__file__).parents[2])


def why_not_now(modes: list[Any], *, watched: bool) -> str:
    """What is around the backward pass. `watched`: whether it is that of a first step that is
    looked at, which is not done to collectives."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and watched:
        return "the job runs as one of several ranks"
    if has_compiled():
        return "torch.compile returns gradients all at once"
    if _get_current_dispatch_mode_stack() != modes:
        return "the backward pass runs under a dispatch mode"
    if in_autocast():
        return "the backward pass runs under autocast"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the backward pass is captured as a CUDA graph"
    return ""


def why_not_this(
    _gradients: Any, keep_graph: bool, create_graph: bool, inputs: Any = (), *_: Any
) -> str:
    """What the engine is asked for, beside the roots."""
    if keep_graph or create_graph:
        return "the backward pass keeps its graph"
    return "the backward pass is for chosen inputs" if inputs else ""


def why_not_placed(optimizers: list[Optimizer]) -> str:
    """Why the parameters, where they are now, may not be updated one by one."""
    reasons = (why_not_replaced(one) or why_not(one) for one in optimizers)
    if reason := next(filter(None, reasons), ""):
        return reason
    found = [t for o in optimizers for g in o.param_groups for t in g["params"]]
    if len({id(tensor) for tensor in found}) < len(found):
        return "a parameter has two optimizers"
    if torch.cuda.is_available() and any(one.is_cpu and part_of(one) is not one for one in found):
        return "FSDP2 keeps weights on the host, where their gradients may not have arrived"
    return "parameters share memory" if share_memory(found) else ""


def in_autocast() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def reads_gradients() -> str:
    """`train.py:12` for the first line of the job's own modules that reads a `.grad` for more than
    whether there is one; empty where none does. What is installed is not searched."""
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        if is_installed(name):
            continue
        line = _first_read(Path(name))
        if line:
            return f"{Path(name).name}:{line}"
    return ""


def _first_read(path: Path) -> int:
    """Line of the first read in a file; 0 for none."""
    try:
        text = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
        tree = ast.parse(text) if b".grad" in text else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    if tree is None:
        return 0
    asks_only = {
        id(operand)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        for operand in (node.left, *node.comparators)
    }
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    changed = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)}
    return min(
        (
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "grad"
            and (isinstance(node.ctx, ast.Load) or id(node) in changed)
            and id(node) not in asks_only
            and id(node) not in called  # torch.autograd.grad(…)
        ),
        default=0,
    )
