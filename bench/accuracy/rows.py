"""The measured rows, and the command that replays each."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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
        commands: script and arguments, after memplan's options for the rank if any, by variant;
            several where a mode was not recorded.
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
    published = {name: row.get(f"{name}_bytes", "") for name in ESTIMATORS}
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
_FSDP = (
    "rank 0; random tokens; torchtitan's recipe of the commit that its table names, with today's "
    "FSDP2 and allocator; flash attention, as PyTorch then chose it"
)
CARDS = {"H100-96GB": "95GiB:sm90"}
"""Cards without a profile: the total memory by torchtitan's logs, `36.95GiB(38.89%)`."""


class LlmJob(NamedTuple):
    """How a row of llm.csv is replayed.

    Attributes:
        command: script in this folder and its arguments.
        measure: as in `Row`.
        assumed: as in `Row`.
        current: as in `Row`.
        place: memplan's options for the rank, where the job has many.
    """

    command: str
    measure: str
    assumed: str
    current: bool = False
    place: tuple[str, ...] = ()


LLM_JOBS = {
    "phi15-lora-mb1": LlmJob("llm_lora.py --micro-batch-size 1", "allocated_peak", _LORA),
    "phi15-lora-mb4": LlmJob("llm_lora.py --micro-batch-size 4", "allocated_peak", _LORA),
    "llama32-3b-full-packed": LlmJob(
        "llm_packed.py",
        "allocated_peak",
        "SDPA's flash kernel saves what compiled flex attention saves; one plain cross entropy "
        "over fp32 logits; torch.optim.AdamW (foreach), no clipping",
    ),
    "llama32-3b-peft-full": LlmJob(
        f"llm_peft.py --method full --longest {_LONGEST}", "reserved_peak", _PEFT, current=True
    ),
    "llama32-3b-peft-lora32": LlmJob(
        f"llm_peft.py --method lora --longest {_LONGEST}", "reserved_peak", _PEFT, current=True
    ),
    "llama31-8b-fsdp8": LlmJob(
        "llm_fsdp.py",
        "reserved_peak",
        _FSDP,
        current=True,
        place=("--world-size", "8", "--rank", "0"),
    ),
}
"""The rows of llm.csv that are replayed."""


def llm_rows(file: Path | None = None) -> list[Row]:
    """The rows of llm.csv that a script here replays, in its order."""
    with (file or SHARED_DATA / "measured" / "llm.csv").open(newline="") as lines:
        return [_llm(row) for row in csv.DictReader(lines) if row["job"] in LLM_JOBS]


def _llm(row: dict[str, str]) -> Row:
    job = LLM_JOBS[row["job"]]
    script, *arguments = job.command.split()
    return Row(
        key=row["job"],
        gpu=CARDS.get(row["gpu"], row["gpu"]),
        measured_bytes=int(row["measured_bytes"]),
        commands={"": [*job.place, str(JOBS / script), *arguments]},
        measure=job.measure,
        assumed=job.assumed,
        current=job.current,
    )
