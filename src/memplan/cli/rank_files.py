"""Names of the files of a run, one a rank."""

from __future__ import annotations

import os
from pathlib import Path


def rank() -> int | None:
    """The rank of this process in a job of several; None in a job of one."""
    number = os.environ.get("RANK", "")
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return int(number) if several and number.isdecimal() else None


def named_for(path: str, number: int) -> str:
    """`job.trace` of rank 3 is `job.rank3.trace`."""
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.rank{number}{whole.suffix}"))


def of_rank(path: str) -> str:
    """The name for this process's rank; as it is in a job of one process."""
    number = rank()
    return path if number is None else named_for(path, number)


def plan_of_rank(path: str) -> str:
    """The rank's own plan where there is one, else the plan of that name."""
    own = of_rank(path)
    return own if Path(own).is_file() else path
