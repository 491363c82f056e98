"""`%load_ext memplan`, then `%%memplan --gpu rtx4090` over a cell that trains."""

from __future__ import annotations

import gc
from typing import Any

from IPython.core.magic_arguments import MagicArgumentParser

import memplan
from memplan.types.errors import MemplanError
from memplan.types.estimate import Estimate


def load(shell: Any) -> None:
    """Register the magic, before the notebook's first real backward pass."""
    parser = MagicArgumentParser("%%memplan")
    parser.add_argument("--gpu", help="the card: h100, rtx4090, 24GiB; else there is no verdict")
    parser.add_argument("--all", action="store_true", help="run all, also when a step repeats")

    def run(line: str, cell: str) -> Estimate | None:
        args = parser.parse_argstring(line)
        try:
            return _estimate(shell, cell, args.gpu, stop=not args.all)
        except MemplanError as error:
            shell.showtraceback((type(error), error.with_traceback(None), None))
            return None
        finally:
            gc.collect()  # with the last fake tensor PyTorch's classes are as they were

    run.__doc__ = (
        "Run the cell on fake CUDA, and show how much GPU memory it needs. The cell sees the "
        "notebook's names; those that it makes itself are gone afterwards.\n\n"
        f"{parser.format_help()}"
    )
    memplan.prepare()
    shell.register_magic_function(run, "cell", "memplan")


def _estimate(shell: Any, cell: str, gpu: str | None, *, stop: bool) -> Estimate:
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, shell.execution_count, raw_code=cell)
    names = dict(shell.user_ns)
    with memplan.capture(gpu=gpu, stop=stop) as captured:
        exec(compile(source, name, "exec"), names)
    return captured.estimate()
