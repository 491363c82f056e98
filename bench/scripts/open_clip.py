"""OpenCLIP's training loop on its own synthetic data."""

from __future__ import annotations

from bench.scripts.case import Case, Reference, Setup, pinned
from bench.scripts.checks import share

SETUP = Setup(
    "open_clip",
    wheels=pinned("braceexpand ftfy open-clip-torch wcwidth webdataset"),
)
_PARAMETERS = 151_277_313
"""Of ViT-B/32 and its text tower."""

CASES = (
    Case(
        name="open-clip",
        setup=SETUP,
        package="open-clip-torch==3.3.0",
        argv=(
            "-m", "open_clip_train.main", "--dataset-type", "synthetic",
            "--train-num-samples", "4096", "--batch-size", "128", "--model", "ViT-B-32",
            "--precision", "amp_bf16", "--epochs", "2", "--workers", "2", "--logs", "{work}/logs",
        ),
        checks=(
            share("parameters", 4 * _PARAMETERS),
            share("optimizer_state", 8 * _PARAMETERS),
        ),
        floor=Reference(16 * _PARAMETERS, "151.3 M × 16 bytes"),
        script="`-m open_clip_train.main --model ViT-B-32 --precision amp_bf16 --batch-size 128`",
    ),
)  # fmt: skip
