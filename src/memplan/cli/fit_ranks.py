"""`memplan fit` of several ranks: those that differ, as stages of a pipeline do, have plans of
their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memplan.cli.files import output_path
from memplan.cli.rank_files import named_for
from memplan.worker.signals import raise_received

if TYPE_CHECKING:
    from memplan.fit.answer import Fit, RankFit
    from memplan.fit.flow import Fitted
    from memplan.types.plan import Plan
    from memplan.worker.ranks import SeenRanks


def fit_ranks(seen: SeenRanks, fit_rank: Callable[[int], Fitted]) -> tuple[Fit, Mapping[int, Plan]]:
    """The answer for a job whose ranks have been captured, and a plan for each of its ranks; none
    where one does not fit, after which no other is looked at. `fit_rank`: the answer for one."""
    rows: list[RankFit] = []
    answers: list[Fit] = []
    plans: dict[int, Plan] = {}
    kinds = seen.alike()
    for rank, ranks in kinds.items():
        raise_received()  # by a signal the last answer came early, and this one is missing
        fitted = fit_rank(rank)
        answers.append(fitted.answer)
        rows.append(_row(rank, ranks, fitted.answer))
        if fitted.plan is None:
            plans.clear()
            break
        plans.update(dict.fromkeys(ranks, fitted.plan))
    place = max(range(len(rows)), key=lambda n: (not rows[n].fits, rows[n].added_seconds))
    why = "the one whose plan adds most seconds to a step" if plans else "which does not fit"
    answer = msgspec.structs.replace(
        answers[place],
        ranks=rows,
        captures=sum(one.captures for one in answers),
        seconds=sum(one.seconds for one in answers),
        notes=[
            *answers[place].notes,
            *[f"the answer is about rank {rows[place].rank}, {why}"] * (len(kinds) > 1),
            *seen.taken_for_granted(),
        ],
    )
    return answer, plans


def check_names(path: Path, size: int, *, force: bool) -> None:
    """Raises UsageError where a rank's file is there and `force` is not set."""
    for rank in range(size):
        output_path(named_for(str(path), rank), force=force)


def save_plans(plans: Mapping[int, Plan], path: Path, *, size: int, force: bool) -> None:
    """One file where all ranks have the same plan, else one for each: what `memplan run --plan`
    looks for."""
    from memplan.types.plan_file import save_plan

    one, *others = plans.values()
    if all(plan is one for plan in others):
        for rank in range(size):  # that of an earlier job would be taken for this rank's
            Path(named_for(str(path), rank)).unlink(missing_ok=True)
        save_plan(one, path, overwrite=force)
        return
    for rank, plan in plans.items():
        save_plan(plan, Path(named_for(str(path), rank)), overwrite=force)


def _row(rank: int, ranks: list[int], answer: Fit) -> RankFit:
    from memplan.fit.answer import RankFit

    shown = answer.after or answer.before
    return RankFit(
        rank=rank,
        ranks=ranks,
        fits=answer.fits,
        peak_bytes=shown.peak_bytes,
        low_bytes=shown.low_bytes,
        high_bytes=shown.high_bytes,
        added_seconds=answer.added_seconds,
        added_fraction=answer.added_fraction,
        levers=answer.levers,
    )
