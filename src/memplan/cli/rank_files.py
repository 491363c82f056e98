"""Names of the files of a run, one a rank."""

from __future__ import annotations

import os
from pathlib import Path


def rank() -> int | None:
    """The rank of this process in a job of several; None in a job of one."""
    number = os.environ.get("RANK", "")
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return int(number) if several and number.isdecimal() else None


def of_rank(path: str) -> str:
    """`job.trace` of rank 3 is `job.rank3.trace`; the name as it is in a job of one process."""
    number = rank()
    if number is None:
        return path
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.rank{number}{whole.suffix}"))


def plan_of_rank(path: str) -> str:
    """The rank's own plan where there is one, else the plan of that name."""
    own = of_rank(path)
    return own if Path(own).is_file() else path
