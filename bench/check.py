"""Hold the committed results to the goals: exit 1 and name each goal that they miss.

    python -m bench.check [GOALS.toml [RESULTS-FOLDER]]

A goal whose result file is absent, unreadable or lacks the value is missed as well.
"""

from __future__ import annotations

import json
import operator
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.results import RESULTS

GOALS = Path(__file__).with_name("goals.toml")
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Goal:
    """One line of what the results must show.

    Attributes:
        result: name of the result file, without `.json`.
        path: where the value is in the result's `data`, keys joined by dots.
        compare: a key of `COMPARISONS`.
        bound: a number, or the path of one in the same `data`.
        says: the goal in a sentence.
    """

    result: str
    path: str
    compare: str
    bound: float | str
    says: str


@dataclass(frozen=True)
class Verdict:
    """Whether a goal is met, and what was found."""

    goal: Goal
    met: bool
    found: str


def read_goals(file: Path = GOALS) -> list[Goal]:
    """The goals in a file. Raises ValueError for one that cannot be checked."""
    goals = []
    for row in tomllib.loads(file.read_text(encoding="utf-8"))["goal"]:
        bounds = [row[key] for key in ("value", "to") if key in row]
        if len(bounds) != 1 or row.get("compare") not in COMPARISONS:
            raise ValueError(f"{file}: a goal needs one of 'value' and 'to', and 'compare': {row}")
        goals.append(Goal(row["result"], row["path"], row["compare"], bounds[0], row["says"]))
    return goals


def judge(goal: Goal, folder: Path = RESULTS) -> Verdict:
    """Hold one goal to the result file it names in `folder`."""
    file = folder / f"{goal.result}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))["data"]
        value = _number(data, goal.path)
        bound = _number(data, goal.bound) if isinstance(goal.bound, str) else goal.bound
    except FileNotFoundError:
        return Verdict(goal, False, f"no {file.name}")
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(goal, False, f"{file.name}: {error}")
    met = COMPARISONS[goal.compare](value, bound)
    return Verdict(goal, met, f"{value:.12g}, goal {goal.compare} {bound:.12g}")


def _number(data: Any, path: str) -> float:
    for key in path.split("."):
        if not isinstance(data, dict) or key not in data:
            raise KeyError(f"no {path!r}")
        data = data[key]
    if isinstance(data, bool) or not isinstance(data, int | float):
        raise TypeError(f"{path!r} is {data!r}, not a number")
    return data


def main(arguments: list[str]) -> int:
    goals = read_goals(Path(arguments[0]) if arguments else GOALS)
    folder = Path(arguments[1]) if len(arguments) > 1 else RESULTS
    verdicts = [judge(goal, folder) for goal in goals]
    for verdict in verdicts:
        mark = "met   " if verdict.met else "MISSED"
        print(f"{mark}  {verdict.goal.result:13s} {verdict.goal.says} ({verdict.found})")
    missed = sum(not verdict.met for verdict in verdicts)
    print(f"{len(verdicts) - missed} of {len(verdicts)} goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
