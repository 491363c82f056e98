"""The grid of combinations, and the options that it varies, found in a command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from memplan.capturing.options import ScriptTarget
from memplan.fit.options import plain_name
from memplan.types.errors import UsageError


@dataclass(frozen=True)
class Dimension:
    """An option and the values to try."""

    name: str
    values: tuple[str, ...]


def read_dimension(text: str) -> Dimension:
    """`batch-size=4,8,16`. Raises UsageError."""
    name, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(","))
    if not equals or not plain_name(name) or not all(found):
        raise UsageError(f"--vary {text!r} is no option with values", "--vary batch-size=4,8,16")
    if len(set(found)) < len(found):
        raise UsageError(
            f"--vary {text!r} names a value twice",
            f"--vary {name}=" + ",".join(dict.fromkeys(found)),
        )
    return Dimension(name.strip(), found)


def combinations(
    gpus: Sequence[str], dimensions: Sequence[Dimension], most: int
) -> list[tuple[str, tuple[str, ...]]]:
    """Every card with every value of every option. Raises UsageError where they are more than
    `most`, and for an option that is varied twice."""
    names = [plain_name(one.name) for one in dimensions]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"--vary {name} is given twice", f"--vary {name}=1,2,4 with all values"
            )
    size = len(gpus) * math.prod(len(one.values) for one in dimensions)
    if size > most:
        raise UsageError(
            f"the grid has {size:,} combinations, more than {most:,}",
            f"fewer values, or --most {size} to have them all captured",
        )
    return list(product(gpus, product(*(one.values for one in dimensions))))


def changed_words(words: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """The words of launchers with another value of an option that is among them."""
    return ScriptTarget("script", "", tuple(words)).with_option(option, value).argv
