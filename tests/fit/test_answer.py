"""What stands beside the answer: bounded time, the least memory, the frontier, an early end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from memplan.capturing.options import ScriptTarget
from memplan.fit.choice import Limits
from memplan.fit.flow import Fitted, fit
from memplan.fit.search import Search
from memplan.fit.text import fit_lines, verdict
from memplan.types.device import find_profile
from memplan.types.plan import Plan
from memplan.worker.captures import Captured, NotYetError
from tests.fit.chain_job import MIB, ChainProgram, Greedy
from tests.fit.test_command import memplan

PROGRAM = ScriptTarget("script", "train.py", ("--lr", "1"))


def chain(card: str, **options: object) -> ChainProgram:
    return ChainProgram(find_profile(card), **options)  # type: ignore[arg-type]


def found(job: ChainProgram, limits: Limits) -> Fitted:
    return fit(PROGRAM, job.profile, job, Greedy(), limits=limits)


@cache
def unlimited() -> Fitted:
    return found(chain("2600MiB"), Limits())


def first_line(fitted: Fitted) -> str:
    return next(fit_lines(fitted.answer)).plain


def test_a_plan_beyond_the_time_allowed_is_not_the_answer() -> None:
    free = unlimited()
    needs = free.answer.added_fraction
    assert free.answer.fits and needs > 0.05
    bounded = found(chain("2600MiB"), Limits(at_most=0.05))
    answer = bounded.answer
    assert not answer.fits and bounded.plan is None and answer.after is not None
    assert answer.after.fits and answer.added_fraction == needs and not answer.changes
    assert answer.least_card_bytes is not None
    assert answer.least_card_bytes > answer.gpu.total_bytes, "within 5 % of the time"
    assert re.fullmatch(
        r"does not fit 2600 MiB with any plan tried within \+5\.0 % time: "
        r"a card of \d+ MiB would do, or \+\d+ % time",
        first_line(bounded),
    )
    assert "on a card with room" not in [line.plain for line in fit_lines(answer)][1]
    enough = found(chain("2600MiB"), Limits(at_most=needs + 0.01))
    assert enough.answer.fits and enough.plan is not None


def test_the_least_memory_stands_beside_the_cheapest() -> None:
    answer = unlimited().answer
    assert answer.least is not None and answer.after is not None and answer.exact is None
    assert answer.least.peak_bytes < answer.after.peak_bytes
    assert answer.least.added_fraction > answer.added_fraction
    assert answer.least.least_card_bytes == min(a.least_card_bytes for a in answer.attempts)
    assert answer.least.bound == "compute"


def test_a_rank_that_was_looked_at_alone_is_named() -> None:
    fitted = unlimited()
    before = msgspec.structs.replace(fitted.answer.before, rank=0, world_size=4)
    answer = msgspec.structs.replace(fitted.answer, before=before)
    assert verdict(answer) == f"rank 0 of 4: {first_line(fitted)}"


def test_what_the_link_adds_stands_beside_the_step() -> None:
    """The captured operators do not show it."""
    times = {"step_seconds": 0.1, "step_low_seconds": 0.08, "step_high_seconds": 0.12}
    plain = unlimited().answer
    before = msgspec.structs.replace(plain.before, **times)
    lever = msgspec.structs.replace(plain.levers[0], added_seconds=0.04)
    for bound, said in (("link", "; the host's link adds 40 ms"), ("compute", "")):
        levers = [msgspec.structs.replace(lever, bound=bound)]
        answer = msgspec.structs.replace(plain, before=before, after=before, levers=levers)
        assert list(fit_lines(answer))[2].plain == f"step 100 ms (80–120){said}"


@pytest.mark.parametrize("card", ["2600MiB", "24GiB"])
def test_a_frontier_of_captured_plans(card: str) -> None:
    """Also for a job that fits."""
    job = chain(card)
    fitted = found(job, Limits(frontier=True))
    points = fitted.answer.frontier
    assert len(points) >= 4 and len(points) == len(fitted.frontier)
    for before, after in pairwise(points):
        assert after.added_fraction > before.added_fraction
        assert after.peak_bytes < before.peak_bytes
        assert after.least_card_bytes < before.least_card_bytes
    asked = [plan.recompute.groups for _, plan in job.asked if plan and plan.recompute]
    for point, plan in zip(points, fitted.frontier, strict=True):
        recomputes = any(lever.kind == "recompute" for lever in point.levers)
        assert recomputes == (plan.recompute is not None) == (point.bound == "compute")
        if plan.recompute is not None:
            assert plan.recompute.groups in asked, "captured, not guessed"
    assert sum("frontier" in line.plain for line in fit_lines(fitted.answer)) == len(points)


def test_a_plan_that_does_not_fit_is_within_the_time_allowed() -> None:
    answer = found(chain("1250MiB", weight=2 * MIB), Limits(at_most=0.05)).answer
    assert not answer.fits and answer.added_fraction <= 0.05
    assert any(one.added_fraction > 0.05 for one in answer.attempts)


def test_what_does_not_fit_names_the_levers() -> None:
    fitted = found(chain("1250MiB", weight=2 * MIB), Limits())
    assert not fitted.answer.fits
    assert fitted.answer.levers_tried == ["allocator", "order", "recompute", "offload"]
    first, second, *_ = (line.plain for line in fit_lines(fitted.answer))
    assert second.startswith("with the best plan: peak ")
    assert second.endswith("; tried: allocator, order, recompute, offload")
    card = re.fullmatch(
        r"does not fit 1250 MiB with any plan tried: a card of (\d+) MiB would do", first
    )
    assert card and int(card[1]) * MIB >= (fitted.answer.least_card_bytes or 0)
    assert fitted.answer.notes[-1] == (
        "Levers that change numbers were not tried: the loss in chunks (--allow rounding), "
        "smaller batches (--allow rounding), optimizer state in 8 bits (--allow numbers)."
    )


@pytest.mark.parametrize(("card", "shares"), [("2600MiB", (0, 2, 3)), ("1250MiB", (2,))])
def test_captures_ahead_change_nothing(card: str, shares: tuple[int, ...]) -> None:
    """Whichever has ended when it is asked for, and whichever is asked for in vain."""
    plain = found(chain(card, weight=2 * MIB), Limits()).answer
    for share in shares:
        job = chain(card, weight=2 * MIB)
        begun: list[Plan | None] = []

        def ahead(
            program: ScriptTarget,
            plan: Plan | None = None,
            *,
            quiet: bool = False,
            steps: int | None = None,
            job: ChainProgram = job,
            begun: list[Plan | None] = begun,
            share: int = share,
        ) -> Captured:
            begun.append(plan)
            if share and len(begun) % share == 0:
                return job(program, plan, quiet=quiet)
            raise NotYetError

        answer = fit(PROGRAM, job.profile, job, Greedy(), ahead=ahead).answer
        assert begun and answer.captures == plain.captures
        assert answer.attempts == plain.attempts and answer.changes == plain.changes
        assert answer.levers == plain.levers and answer.least == plain.least


def test_a_lever_that_the_job_cannot_have_is_not_said_to_be_tried() -> None:
    job, said = chain("1250MiB", weight=2 * MIB), list[str]()
    fit(PROGRAM, job.profile, job, Greedy(), said.append)
    assert any(line.startswith("trying activations on the host") for line in said)
    assert not any("frozen" in line for line in said)


def test_all_solvers_together_have_a_minute() -> None:
    search = Search()
    assert search.solving_seconds(6.0) == 6.0
    search.solved(time.process_time() - 52.0)
    assert search.solving_seconds(6.0) == pytest.approx(2.0, abs=0.1)
    search.solved(time.process_time() - 8.0)
    assert 0 < search.solving_seconds(6.0) < 1


class Interrupted(ChainProgram):
    """Ctrl-C comes in the n-th capture."""

    at = 0

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        if len(self.asked) == self.at:
            raise KeyboardInterrupt
        return super().__call__(program, plan, quiet=quiet)


def test_an_early_end_gives_the_best_so_far() -> None:
    job = Interrupted(find_profile("2600MiB"))
    job.at = 2
    fitted = found(job, Limits())
    assert fitted.answer.fits and not fitted.answer.complete and fitted.plan is not None
    assert "ended early" in first_line(fitted) and len(fitted.answer.attempts) == 1
    job = Interrupted(find_profile("2600MiB"))
    job.at = 1
    fitted = found(job, Limits())
    assert not fitted.answer.fits and not fitted.answer.complete and fitted.plan is None
    job = Interrupted(find_profile("2600MiB"))
    with pytest.raises(KeyboardInterrupt):
        found(job, Limits())


SCRIPT = """
import os, time
import torch

while os.path.exists("wait"):
    time.sleep(0.05)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(torch.randn(200_000, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [(signal.SIGTERM, 1, 3), (signal.SIGINT, 1, 3), (signal.SIGINT, 2, 130)],
)
def test_a_signal_gets_what_is_known(
    tmp_path: Path, number: signal.Signals, times: int, code: int
) -> None:
    """Once there is a capture. A second Ctrl-C ends it at once."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with memplan(tmp_path, "fit", "--json", "--gpu", "1GiB", "-o", "a.plan", "train.py") as process:
        assert process.stderr is not None and process.stdout is not None
        while "looking for a plan" not in process.stderr.readline():
            assert process.poll() is None
        (tmp_path / "wait").touch()
        while not (captures := children(process.pid)):
            time.sleep(0.05)
        process.send_signal(number)
        while "ending early" not in process.stderr.readline():
            assert process.poll() is None
        if times == 2:  # only now: two that wait become one
            process.send_signal(number)
        out, _ = process.communicate(timeout=300)
        ended = process.returncode  # a signal that comes while Python ends is what it dies of
        ended = 128 - ended if ended < 0 else ended
        assert ended == code or (times == 2 and ended == 3)  # the answer may be there before it
    if ended == 3:
        answer = json.loads(out)
        assert answer["complete"] is False and answer["fits"] is False and answer["before"]
    assert not list((tmp_path / "scratch").iterdir()) and not (tmp_path / "a.plan").exists()
    for capture in captures:
        with pytest.raises(ProcessLookupError):
            os.kill(capture, 0)
