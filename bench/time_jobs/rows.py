"""The published figures, and the capture of each."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import NamedTuple

from bench.results import ROOT
from bench.timm_table.capture import captured_once
from memplan.capturing.options import CaptureOptions, RankPlace, ScriptTarget
from memplan.types.device import find_profile
from memplan.worker.request import CaptureRequest

HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "time_jobs"
GPUS_PER_NODE = 8
SOURCES = {
    "llm-foundry": "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
    "torchtitan": "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
}


class Published(NamedTuple):
    """A job's speed as somebody measured it."""

    source: str
    gpu: str
    ranks: int
    size: str
    seq_len: int
    micro_batch: int
    accumulate: int
    checkpoint: bool
    pure: bool
    tokens_per_second: float
    """Of one GPU."""
    calibrates: bool
    """Whether cards of its generation are calibrated on it, and not checked."""

    @property
    def key(self) -> str:
        kept = "recomputed" if self.checkpoint else "kept"
        return (
            f"{self.size}-{self.gpu}-{self.ranks}-{self.seq_len}-{self.micro_batch}"
            f"x{self.accumulate}-{kept}"
        )

    @property
    def step_seconds(self) -> float:
        return self.micro_batch * self.accumulate * self.seq_len / self.tokens_per_second

    @property
    def arguments(self) -> list[str]:
        flags = [
            flag
            for flag, asked in (("--checkpoint", self.checkpoint), ("--pure", self.pure))
            if asked
        ]
        return [
            "--size", self.size, "--batch-size", str(self.micro_batch),
            "--seq-len", str(self.seq_len), "--accumulate", str(self.accumulate), *flags,
        ]  # fmt: skip


def published() -> list[Published]:
    """The rows of `published.csv`, in its order."""
    with (HERE / "published.csv").open(newline="") as lines:
        return [
            Published(
                source=row["source"],
                gpu=row["gpu"],
                ranks=int(row["ranks"]),
                size=row["size"],
                seq_len=int(row["seq_len"]),
                micro_batch=int(row["micro_batch"]),
                accumulate=int(row["accumulate"]),
                checkpoint=row["checkpoint"] == "1",
                pure=row["pure"] == "1",
                tokens_per_second=float(row["tokens_per_second_per_gpu"]),
                calibrates=row["use"] == "calibrate",
            )
            for row in csv.DictReader(lines)
        ]


def trace_path(job: Published) -> Path:
    return FOLDER / f"{job.key}.trace"


def request(job: Published) -> CaptureRequest:
    """The capture of the job's first rank."""
    place = RankPlace(0, job.ranks, GPUS_PER_NODE)
    target = ScriptTarget("script", str(HERE / "mpt.py"), tuple(job.arguments))
    options = CaptureOptions(profile=find_profile(job.gpu), place=place)
    return CaptureRequest(program=target, options=options)


def main() -> int:
    """Capture what is not captured yet."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for key, said in captured_once(((job.key, request(job)) for job in published()), FOLDER):
        print(f"{key:50s} {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
