"""A job with part of a plan in effect: what every lever starts from, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from memplan import __version__
from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Attempt, Lever
from memplan.fit.judge import WORTH, Verdict, judge, least_card, lowers
from memplan.fit.search import Found, Search
from memplan.phases import find_steps, request_signature, step_graphs
from memplan.phases.optimizer_in_backward import UpdatesInBackward, updates_in_backward
from memplan.types.device import DeviceProfile
from memplan.types.plan import Fingerprint, Part, Plan
from memplan.types.trace import Trace
from memplan.worker.captures import Captured, CaptureProgram, NotYetError
from memplan.worker.failure import CaptureFailedError

CAUTION = 1.1
"""More goes to the host than is missing: gaps between blocks do not go with it."""
_MOSTLY = 0.8
"""A share from which on all of it goes."""


@dataclass(frozen=True)
class MoreNodes:
    """A job of many processes on more nodes than it was started on."""

    ranks: int
    capture: CaptureProgram
    command: tuple[str, ...]
    """Launcher and script; empty where no launcher is known."""


@dataclass(frozen=True)
class Job:
    """What is asked: a program and a card, how the program is captured, and what came of it."""

    program: ScriptTarget
    profile: DeviceProfile
    capture: CaptureProgram
    search: Search
    ahead: CaptureProgram | None = None
    """The same without waiting. Raises NotYetError: the capture begins when there is room."""
    host_bytes: int | None = None
    """Page-locked host memory that levers may use; None for no limit."""
    ranks: int = 1
    more_nodes: Callable[[int], MoreNodes | None] = lambda times: None
    """The same job on so many times its nodes."""


@dataclass(frozen=True)
class State:
    """A job as captured with a plan in effect."""

    job: Job
    plan: Plan
    """What is in effect, without promises; `promised()` has them."""
    captured: Captured
    verdict: Verdict
    levers: tuple[Lever, ...] = ()
    """The plan's levers, in the order in which they were found."""
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return self.verdict.fits

    @property
    def added_seconds(self) -> float:
        """Seconds that all levers add to a step."""
        return sum(lever.added_seconds for lever in self.levers)

    @property
    def host_left(self) -> int | None:
        """Page-locked bytes of the host that a further lever may use; None: no bound."""
        most = self.job.host_bytes
        if most is None:
            return None
        return max(0, most - sum(p.host_bytes for p in (self.plan.state, self.plan.frozen) if p))

    def shares_for_host(self, total: int, missing: int) -> tuple[float, float]:
        """Of `total` bytes that may go to the host, with `missing` too many on the card: the share
        to begin with, 0 where it is too little to be worth a lever, and the largest that the host
        has room for."""
        most = self.host_left
        largest = 1.0 if most is None or not total else min(1.0, most / total)
        if total < WORTH * self.verdict.estimate.high_bytes or not largest:
            return 0.0, largest
        share = CAUTION * missing / total
        return min(largest, share if 0 < share <= _MOSTLY else 1.0), largest

    @cached_property
    def in_backward(self) -> UpdatesInBackward:
        """What its trace says of updates in the backward pass."""
        return updates_in_backward(self.captured.trace)

    @cached_property
    def needed(self) -> int:
        """Bytes of the least card that it fits."""
        return least_card(self.captured.trace, self.job.profile, self.verdict)

    def trying(self, **parts: Any) -> State:
        """The job, captured again with these parts of the plan, too. Raises CaptureFailedError."""
        plan = msgspec.structs.replace(self.plan, **parts)
        self.job.search.begins()
        try:
            captured = self.job.capture(self.job.program, plan, quiet=True)
        except CaptureFailedError:
            self.job.search.fails.update(parts)
            raise
        self.job.search.fails -= parts.keys() - captured.trace.meta.unmet.keys()
        self.job.search.fails |= parts.keys() & captured.trace.meta.unmet.keys()
        self.job.search.captured()
        verdict = judge(captured.trace, self.job.profile, captured.estimate)
        return replace(self, plan=plan, captured=captured, verdict=verdict)

    def with_tried(
        self, lever: Callable[[State], Lever], *parts: dict[str, Any], fails: str
    ) -> State:
        """The job captured again with these parts of a plan, the first that the script does not
        fail with, where they lower the high bound by 1 % or more; `lever`: what they do, but for
        the bytes saved.

        As it is where not: with `fails` where the script fails with each, else with what the
        capture says of these parts.
        """
        for one in parts:
            with suppress(CaptureFailedError):
                after = self.trying(**one)
                break
        else:
            return self.with_note(f"{fails}: the script fails with it.")
        if not lowers(self.verdict, after.verdict):
            unmet = after.captured.trace.meta.unmet
            return self.with_note(*(unmet.get(name, "") for name in one))
        saved = self.verdict.estimate.high_bytes - after.verdict.estimate.high_bytes
        return after.with_lever(msgspec.structs.replace(lever(after), saved_bytes=saved))

    def ahead(self, work: Callable[[State], object]) -> None:
        """Have the first capture that `work` asks for of this state begin, where there is room."""
        if self.job.ahead is None:
            return
        job = replace(self.job, capture=self.job.ahead, search=Search())
        with suppress(NotYetError, CaptureFailedError):
            work(replace(self, job=job))

    def with_parts(self, **parts: Any) -> State:
        """The same capture, with more said in parts that are in effect."""
        return replace(self, plan=msgspec.structs.replace(self.plan, **parts))

    def with_lever(self, lever: Lever) -> State:
        return self.with_levers(*self.levers, lever)

    def with_levers(self, *levers: Lever) -> State:
        """These instead of its own."""
        return replace(self, levers=levers)

    def with_note(self, *notes: str) -> State:
        return replace(self, notes=(*self.notes, *filter(None, notes)))

    def found(self) -> State:
        """Itself, counted among the plans that the answer is chosen from."""
        self.job.search.found.append(
            Found(
                plan=self.promised(),
                levers=self.levers,
                notes=self.notes,
                verdict=self.verdict,
                needed=self.needed,
            )
        )
        return self

    def attempted(self, budget: int, planned: int, added_fraction: float) -> None:
        """It was captured for a plan: `found`, and as an `Attempt`, with the bytes of that."""
        estimate = self.found().verdict.estimate
        self.job.search.attempts.append(
            Attempt(
                budget_bytes=budget,
                planned_bytes=planned,
                requested_bytes=estimate.requested_peak_bytes,
                peak_bytes=estimate.peak_bytes,
                high_bytes=estimate.high_bytes,
                least_card_bytes=self.needed,
                alloc_conf=self.verdict.alloc_conf,
                fits=self.fits,
                added_fraction=added_fraction,
            )
        )

    def promised(self) -> Plan:
        """The plan with this capture's peak, and the allocator's settings that it counts on."""
        peak = self.verdict.estimate.allocated_peak_bytes
        parts = ((name, getattr(self.plan, name)) for name in Plan.__struct_fields__)
        return msgspec.structs.replace(
            self.plan,
            alloc_conf=self.verdict.alloc_conf,
            **{
                name: msgspec.structs.replace(part, peak_bytes=peak)
                for name, part in parts
                if isinstance(part, Part)
            },
        )

    def step_seconds(self) -> float:
        """Seconds of forward and backward, by the card's data sheet. Raises NoAnswerError for a
        trace without a backward pass."""
        graphs = step_graphs(self.captured.trace, self.job.profile, 0)
        return sum(graph.plain_seconds for graph in graphs)


def first_state(job: Job, plain: Captured) -> State:
    """The job without a plan, but with what a plan is made from."""
    program, step = job.program, step_range(plain.trace)
    plan = Plan(
        memplan_version=__version__,
        made_from=Fingerprint(
            script=program.name,
            command=[program.name, *program.argv],
            torch_version=plain.estimate.torch_version,
            gpu=job.profile.name,
            ranks=job.ranks,
            requests=request_signature(plain.trace, *step).hex() if step else "",
        ),
    )
    return State(job, plan, plain, judge(plain.trace, job.profile, plain.estimate))


def step_range(trace: Trace) -> tuple[int, int] | None:
    """Events of the steady step; of the last step where none is steady; None without steps."""
    steps = find_steps(trace)
    if not len(steps):
        return None
    start, stop = steps[len(steps) - 1 if steps.steady is None else steps.steady]
    return int(start), int(stop)
