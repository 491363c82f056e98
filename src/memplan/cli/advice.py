"""The exact next command to type, for the end of an answer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.types.device import DEFAULT_PROFILE, known_profiles

if TYPE_CHECKING:
    from memplan.types.estimate import Estimate


def next_command(
    result: Estimate, own_words: list[str], rest: list[str], output: str | None
) -> str:
    """What the reader will most likely type next, ready to be pasted. `rest`: the program, and
    launchers before it."""
    # A trace that was kept is not written over, so the same -o would be refused.
    own = without(own_words, "-o", "--output")
    if result.fits is None:
        words = ["memplan", "estimate", "--gpu", DEFAULT_PROFILE, *own, *rest]
    elif not result.fits and set(without(own, "--gpu")) <= {"-f"}:  # the rest may not be fit's
        words = ["memplan", "fit", *own, "-o", "job.plan", *rest]
    elif not result.fits and (larger := _larger_card(result.high_bytes)):
        words = ["memplan", "estimate", *without(own, "--gpu"), "--gpu", larger, *rest]
    elif output:
        picture = str(Path(output).with_suffix(".pickle"))
        words = ["memplan", "export", "--format", "memory_viz", "-o", picture, output]
    else:
        words = ["memplan", "estimate", *own, "-o", "job.trace", *rest]
    return shlex.join(words)


def _larger_card(needed: int) -> str | None:
    enough = [p for p in known_profiles() if p.total_memory_bytes >= needed]
    return min(enough, key=lambda p: p.total_memory_bytes).name if enough else None


def without(words: list[str], *options: str) -> list[str]:
    """The words without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        drop = skip or word.partition("=")[0] in options
        skip = not skip and word in options
        if not drop:
            kept.append(word)
    return kept
