"""The measured rows, and the command that replays each."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path

from bench.accuracy.text_lengths import METAMATH, longest_at_percentile
from bench.results import ROOT

JOBS = Path(__file__).parent
SHARED_DATA = Path(os.environ.get("MEMPLAN_SHARED_DATA", ROOT.parent / "shared" / "data"))
ESTIMATORS = ("xmem", "dnnmem", "llmem", "schedtune")
UNRECORDED_MODES = (0, 1)
"""Tried where a row's zero_grad mode was not recorded; the better one counts."""
FIXED_MODE = 1


@dataclass(frozen=True)
class Row:
    """A measured job.

    Attributes:
        key: names the row: model, optimizer and batch size, or llm.csv's job.
        gpu: the card, as `memplan estimate --gpu` takes it.
        measured_bytes: the truth.
        measure: what of the estimate to hold against it: `reserved_peak` or `allocated_peak`.
        commands: script and arguments by variant; several where a mode was not recorded.
        published_bytes: what published estimators said, by name; those without an answer absent.
        assumed: what the source does not say and had to be decided.
        current: run with the transformers installed here, not the one of the measurement.
    """

    key: str
    gpu: str
    measured_bytes: int
    commands: dict[str, list[str]]
    measure: str = "reserved_peak"
    published_bytes: dict[str, float] = field(default_factory=dict)
    assumed: str = ""
    current: bool = False


def job_rows(file: Path | None = None) -> list[Row]:
    """The rows of jobs.csv, in its order. Raises OSError or KeyError when it cannot be read."""
    with (file or SHARED_DATA / "measured" / "jobs.csv").open(newline="") as lines:
        return [_job(row) for row in csv.DictReader(lines)]


def _job(row: dict[str, str]) -> Row:
    transformer = row["family"] == "transformer"
    script = str(JOBS / ("transformer_loop.py" if transformer else "cnn_loop.py"))
    command = [
        script, "--model", row["model"], "--optimizer", row["optimizer"],
        "--batch-size", row["batch_size"],
    ]  # fmt: skip
    recorded = row["zero_grad_mode"]
    modes = [int(recorded)] if recorded else UNRECORDED_MODES
    published = {name: row[f"{name}_bytes"] for name in ESTIMATORS}
    assumed = []
    if transformer and row["batch_size"] == "1":
        assumed.append(
            "every text of 103 tokens, the expected longest of four even draws from 1 to 128"
        )
    if not recorded:
        assumed.append("zero_grad mode 0 or 1, the better one counts")
    return Row(
        key=f"{row['model']}/{row['optimizer']}/{row['batch_size']}",
        gpu=row["gpu"],
        measured_bytes=int(row["measured_bytes"]),
        commands={f"mode {mode}": [*command, "--zero-grad-mode", str(mode)] for mode in modes},
        published_bytes={name: float(value) for name, value in published.items() if value},
        assumed="; ".join(assumed),
    )


_LORA = (
    "rotation in bf16; logits cast to fp32 on the way out, as Fabric's half precision does; "
    "2 micro-batches a step; no evaluation pass before; every text of 1,044 tokens"
)
_LONGEST = longest_at_percentile(METAMATH, 99)
_PEFT = (
    f"the 99th percentile's bucket begins with {_LONGEST} tokens, from the published token count, "
    "limit and batching (bench/accuracy/text_lengths.py), and falls by 10 from text to text; "
    "no evaluation pass before"
)
LLM_JOBS: dict[str, tuple[str, str, str, bool]] = {
    # job: (command, measure, assumed, current)
    "phi15-lora-mb1": ("llm_lora.py --micro-batch-size 1", "allocated_peak", _LORA, False),
    "phi15-lora-mb4": ("llm_lora.py --micro-batch-size 4", "allocated_peak", _LORA, False),
    "llama32-3b-full-packed": (
        "llm_packed.py",
        "allocated_peak",
        "SDPA's flash kernel saves what compiled flex attention saves; one plain cross entropy "
        "over fp32 logits; torch.optim.AdamW (foreach), no clipping",
        False,
    ),
    "llama32-3b-peft-full": (
        f"llm_peft.py --method full --longest {_LONGEST}",
        "reserved_peak",
        _PEFT,
        True,
    ),
    "llama32-3b-peft-lora32": (
        f"llm_peft.py --method lora --longest {_LONGEST}",
        "reserved_peak",
        _PEFT,
        True,
    ),
}
"""The one-device rows of llm.csv."""


def llm_rows(file: Path | None = None) -> list[Row]:
    """The one-device rows of llm.csv that a script here replays, in its order."""
    with (file or SHARED_DATA / "measured" / "llm.csv").open(newline="") as lines:
        return [_llm(row) for row in csv.DictReader(lines) if row["job"] in LLM_JOBS]


def _llm(row: dict[str, str]) -> Row:
    command, measure, assumed, current = LLM_JOBS[row["job"]]
    script, *arguments = command.split()
    return Row(
        key=row["job"],
        gpu=row["gpu"],
        measured_bytes=int(row["measured_bytes"]),
        commands={"": [str(JOBS / script), *arguments]},
        measure=measure,
        assumed=assumed,
        current=current,
    )
