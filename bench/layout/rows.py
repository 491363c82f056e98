"""The rows of the layout table, and their captured traces."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.results import ROOT
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace

FOLDER = Path(os.environ.get("MEMPLAN_LAYOUT_TRACES") or ROOT / "build" / "layout-traces")
"""Where captures are kept between runs: they take minutes, and depend on nothing here."""
SCRIPT = Path(__file__).with_name("train.py")
_STEPS = "4"
_RANKS = "4"

_GPT2 = "--model gpt2 --batch 8"
_LLAMA = "--model llama --layers 32 --batch 1 --tokens 4096"
_MOE = "--model moe --batch 2 --tokens 2048"
_RESNET = "--model resnet50 --batch 64 --micro-batches 2"
_PIPELINE = "--pipeline --micro-batches 8"


@dataclass(frozen=True)
class Row:
    """One job: its name and the arguments of `train.py`."""

    name: str
    arguments: str

    @property
    def routed(self) -> bool:
        """Whether sizes depend on a router."""
        return self.name.startswith("moe")


ROWS = (
    Row("gpt2_plain", f"{_GPT2} --layers 12 --micro-batches 4"),
    Row("gpt2_recompute", f"{_GPT2} --layers 12 --micro-batches 4 --recompute"),
    Row("gpt2_pipeline", f"{_GPT2} --layers 16 {_PIPELINE}"),
    Row("llama_plain", f"{_LLAMA} --micro-batches 2"),
    Row("llama_recompute", f"{_LLAMA} --micro-batches 2 --recompute"),
    Row("llama_pipeline", f"{_LLAMA} {_PIPELINE}"),
    Row("llama_pipeline_recompute", f"{_LLAMA} {_PIPELINE} --recompute"),
    Row("moe_plain", f"{_MOE} --layers 4 --micro-batches 2"),
    Row("moe_recompute", f"{_MOE} --layers 4 --micro-batches 2 --recompute"),
    Row("moe_pipeline", f"{_MOE} --layers 8 {_PIPELINE}"),
    Row("resnet50_plain", _RESNET),
    Row("resnet50_recompute", f"{_RESNET} --recompute"),
)


def row_trace(row: Row) -> Trace:
    """The captured trace of a row; captured now unless it was before. Raises CalledProcessError."""
    path = FOLDER / f"{row.name}.trace"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        ranks = ["--world-size", _RANKS, "--rank", "0"] if "--pipeline" in row.arguments else []
        own = ["--gpu", "h200", "--steps", _STEPS, *ranks, "--json", "-f", "-o", str(path)]
        command = [sys.executable, "-m", "memplan", "estimate", *own, str(SCRIPT)]
        done = subprocess.run(
            [*command, *row.arguments.split()], stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode not in (0, 3):
            raise subprocess.CalledProcessError(done.returncode, command)
    return load_trace(path)
