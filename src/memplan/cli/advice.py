"""The exact next command to type, for the end of an answer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.capture.options import ScriptTarget
from memplan.types.device import known_profiles

if TYPE_CHECKING:
    from memplan.types.estimate import Estimate


def next_command(
    result: Estimate, own_words: list[str], program: ScriptTarget, output: str | None
) -> str:
    """What the reader will most likely type next, ready to be pasted."""
    rest = [*(["-m"] if program.kind == "module" else []), program.name, *program.argv]
    own = list(own_words)
    if result.fits is None:
        words = ["memplan", "estimate", "--gpu", "rtx4090", *own, *rest]
    elif not result.fits and (larger := _larger_card(result.high_bytes)):
        words = ["memplan", "estimate", *_without_gpu(own), "--gpu", larger, *rest]
    elif output:
        picture = str(Path(output).with_suffix(".pickle"))
        words = ["memplan", "export", "--format", "memory_viz", "-o", picture, output]
    else:
        words = ["memplan", "estimate", *own, "-o", "job.trace", *rest]
    return shlex.join(words)


def _larger_card(needed: int) -> str | None:
    enough = [p for p in known_profiles() if p.total_memory_bytes >= needed]
    return min(enough, key=lambda p: p.total_memory_bytes).name if enough else None


def _without_gpu(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word != "--gpu" and not word.startswith("--gpu="):
            kept.append(word)
        skip = word == "--gpu"
    return kept
