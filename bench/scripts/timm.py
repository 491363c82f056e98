"""timm's own scripts for benchmarking and training."""

from __future__ import annotations

from pathlib import Path

from bench.scripts.case import Answer, Case, Check, Reference, Setup
from bench.scripts.checks import share

SETUP = Setup("timm", wheels=())
_FOLDER = "{third_party}/timm-scripts"
_EFFICIENTNET = 5_288_548


def _is_within(expected: bool) -> Check:
    """On an RTX 3090 of timm's authors this batch fitted, or the next larger did not."""

    def check(answer: Answer, _work: Path) -> list[str]:
        peak, card = answer["peak_bytes"], answer["gpu"]["total_bytes"]
        return [] if (peak <= card) is expected else [f"peak {peak:,} bytes of {card:,}"]

    return check


def _benchmark(batch: int, *, fits: bool) -> Case:
    return Case(
        name=f"timm-benchmark-{batch}",
        setup=SETUP,
        package="huggingface/pytorch-image-models",
        argv=(
            f"{_FOLDER}/benchmark.py", "--model", "cspresnet50", "--bench", "train", "--amp",
            "--img-size", "256", "-b", str(batch),
        ),
        gpu="rtx3090",
        checks=(_is_within(fits),),
        floor=Reference(12 * 21_616_168, "21.6 M × 12 bytes (SGD)"),
        script=f"`benchmark.py --model cspresnet50 --bench train --amp -b {batch}`; its authors' "
        f"RTX 3090 {'held it' if fits else 'ran out of memory'}",
    )  # fmt: skip


CASES = (
    _benchmark(384, fits=True),
    _benchmark(512, fits=False),
    Case(
        name="timm-train",
        setup=SETUP,
        package="huggingface/pytorch-image-models",
        argv=(
            f"{_FOLDER}/train.py", "{work}/images", "--model", "efficientnet_b0", "-b", "32",
            "--sched", "step", "--epochs", "450", "--decay-epochs", "2.4", "--decay-rate", ".97",
            "--opt", "rmsproptf", "--opt-eps", ".001", "-j", "2", "--warmup-lr", "1e-6",
            "--weight-decay", "1e-5", "--drop", "0.2", "--drop-path", "0.2", "--model-ema",
            "--model-ema-decay", "0.9999", "--aa", "rand-m9-mstd0.5", "--remode", "pixel",
            "--reprob", "0.2", "--amp", "--lr", ".048",
        ),
        prepare=(("-m", "bench.scripts.datasets", "classes", "{work}/images"),),
        checks=(share("optimizer_state", 8 * _EFFICIENTNET, tolerance=0.05),),
        floor=Reference(20 * _EFFICIENTNET, "5.3 M × 20 bytes, the averaged weights included"),
        script="`train.py --model efficientnet_b0 --opt rmsproptf --model-ema --amp …`, its "
        "documented recipe with batches of 32",
    ),
)  # fmt: skip
