"""nanoGPT's scripts in a copy of its folder, with its tokenised data beside them."""

from __future__ import annotations

from bench.scripts.case import Case, Check, Reference, Setup
from bench.scripts.checks import share

SETUP = Setup("nanogpt", wheels=())
_GPT2 = 123_653_376
"""Parameters of GPT-2 small without biases: 50,304 tokens, 1,024 positions, 12 layers."""
_BABY = 10_745_088
"""Six layers of width 384, 65 characters, 256 positions."""


def _case(
    name: str,
    *words: str,
    dataset: str,
    vocabulary: int,
    checks: tuple[Check, ...],
    floor: Reference,
    gpu: str = "rtx4090",
) -> Case:
    return Case(
        name=f"nanogpt-{name}",
        setup=SETUP,
        package="karpathy/nanoGPT",
        argv=words,
        prepare=(
            ("-m", "bench.scripts.datasets", "copy", "{work}/copy", "{third_party}/nanogpt"),
            ("-m", "bench.scripts.datasets", "tokens", f"{{work}}/copy/data/{dataset}",
             str(vocabulary)),
        ),
        cwd="{work}/copy",
        checks=checks,
        floor=floor,
        gpu=gpu,
        script=f"`{' '.join(words)}`",
    )  # fmt: skip


CASES = (
    _case(
        "bench", "bench.py", dataset="openwebtext", vocabulary=50_257,
        checks=(share("parameters", 4 * _GPT2, tolerance=0.03),
                share("optimizer_state", 8 * _GPT2, tolerance=0.03)),
        floor=Reference(16 * _GPT2, "123.7 M × 16 bytes"),
    ),
    _case(
        "eager", "train.py", "--compile=False", dataset="openwebtext", vocabulary=50_257,
        checks=(share("parameters", 4 * _GPT2, tolerance=0.03),
                share("optimizer_state", 8 * _GPT2, tolerance=0.03)),
        floor=Reference(16 * _GPT2, "123.7 M × 16 bytes"),
        gpu="a100-40gb",
    ),
    _case(
        "char-eager", "train.py", "config/train_shakespeare_char.py", "--compile=False",
        dataset="shakespeare_char", vocabulary=65,
        checks=(share("parameters", 4 * _BABY, tolerance=0.03),
                share("optimizer_state", 8 * _BABY, tolerance=0.03)),
        floor=Reference(16 * _BABY, "10.7 M × 16 bytes"),
    ),
)  # fmt: skip
