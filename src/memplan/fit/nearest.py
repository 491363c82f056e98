"""The nearest changes of a job with which it fits, each verified by an estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memplan.fit.answer import Change
from memplan.fit.judge import Verdict, judge, moving_share
from memplan.fit.knobs import Kind, Knob, find_knobs
from memplan.fit.sharding import captured_change, more_ranks, with_options
from memplan.fit.small_state import smaller_states
from memplan.fit.state import State
from memplan.fit.what_if import shard_optimizer
from memplan.report.text import peak_text
from memplan.types.plan import Fingerprint
from memplan.types.trace import Role
from memplan.worker.failure import CaptureFailedError

_WORDS: dict[Kind, str] = {
    "batch_size": "batch size",
    "sequence_length": "sequence length",
    "image_size": "image size",
}
_LEAST: dict[Kind, int] = {"batch_size": 1, "sequence_length": 16, "image_size": 32}
_MULTIPLE: dict[Kind, int] = {"batch_size": 1, "sequence_length": 8, "image_size": 32}
_REFINEMENTS = 2
_USUAL_CAPTURES = 3
_GPUS = (2, 4, 8)


def nearest_changes(plain: State, base: State, lowest: State) -> tuple[list[Change], list[str]]:
    """Changes that fit, nearest first, and sentences about what was tried in vain.

    `lowest`: the job with the plan of the least peak, which is kept in effect: operators are named
    by their place in the step, so it serves other shapes as well. `base`: the same without
    recomputation of what autograd saves. `plain`: without a plan.
    """
    switches, switched = with_options(lowest)
    ranks, too_few = more_ranks(lowest)
    smaller, kept = _smaller_jobs(lowest)
    changes = [*switches, *smaller, *([ranks] if ranks else [])]
    tried = [*switched, *kept, *([too_few] if too_few else [])]
    if ranks is None and not too_few and not _is_sharded(lowest):
        divided, reason = _sharded(base, lowest)
        changes += [divided] if divided else []
        tried += [reason] if reason else []
    of_state, reasons = smaller_states(plain, lowest)
    return [*changes, *of_state], [*tried, *reasons]


def _smaller_jobs(lowest: State) -> tuple[list[Change], list[str]]:
    """Smaller jobs, by options such as the batch size."""
    job = lowest.job
    changes: list[Change] = []
    tried: list[str] = []
    missing: list[str] = []
    knobs = {knob.kind: knob for knob in find_knobs(job.program)}
    share = moving_share(lowest.verdict.estimate, job.profile)
    searches = {kind: _KnobSearch(lowest, knob, share) for kind, knob in knobs.items()}
    for search in searches.values():
        search.begin(1)
    for kind, words in _WORDS.items():
        if kind not in searches:
            missing.append(words)
            continue
        change, reason = searches[kind].run()
        changes += [change] if change else []
        tried += [reason] if reason else []
    if missing:
        words = " or ".join(missing)
        tried.append(
            f"no option for the {words} was found in {job.program.name} or after it (if the "
            "script has one, type it after its name)"
        )
    changes.sort(key=lambda change: -change.after / change.before)
    return changes, tried


def largest_fitting(
    value: int, share: float, fits: Callable[[int], bool], *, least: int = 1, multiple: int = 1
) -> int | None:
    """The largest of value/2, value/4, … not below `least` for which `fits`, by bisection, then
    refined at most twice between it and the next larger one, in multiples of `multiple`.

    `share`: the fraction of `value` that is expected to fit; it only decides what is asked first.
    Where that does not fit, the smallest value comes next: it tells whether any does.
    Assumes that whatever is smaller than a value that fits, fits.
    """
    halves = [value >> k for k in range(1, value.bit_length()) if value >> k >= least]
    low, high = 0, len(halves)
    probe = next((i for i, half in enumerate(halves) if half <= value * share), high - 1)
    while low < high:
        if fits(halves[probe]):
            high = probe
        else:
            low = probe + 1
        probe = (low + high) // 2 if high < len(halves) else high - 1
    if high == len(halves):
        return None
    best, above = halves[high], halves[high - 1] if high else value
    for _ in range(_REFINEMENTS):
        middle = (best + above) // 2 // multiple * multiple
        if not best < middle < above:
            break
        if fits(middle):
            best = middle
        else:
            above = middle
    return best


@dataclass
class _KnobSearch:
    """Captures the program with smaller values of one option."""

    state: State
    """The state that has its plan in effect."""
    knob: Knob
    share: float
    """The share of the option's value that is expected to fit."""
    seen: dict[int, Verdict] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def run(self) -> tuple[Change | None, str]:
        """The change, or why there is none."""
        option, value = self.knob.option, self._largest(self._fits)
        if value is not None:
            return self._change(value), ""
        if self.seen:
            smallest = min(self.seen)
            needs = peak_text(self.seen[smallest].estimate)
            return None, f"{option} {smallest} does not fit either: {needs}"
        if self.failed:
            smallest, said = min(self.failed.items())
            return None, f"{option} {smallest} could not be captured: {said}"
        return None, f"{option} {self.knob.value} cannot be made smaller"

    def begin(self, count: int) -> None:
        """The next captures, where there is room, as they are expected to be."""

        def expected(value: int) -> bool:
            nonlocal count
            if value in self.seen or value in self.failed:
                return value in self.seen and self.seen[value].fits
            if count:
                self.state.ahead(lambda state: self._captured(state, value))
            count = max(count - 1, 0)
            return value <= self.knob.value * self.share

        self._largest(expected)

    def _largest(self, fits: Callable[[int], bool]) -> int | None:
        knob, kind = self.knob, self.knob.kind
        return largest_fitting(
            knob.value, self.share, fits, least=_LEAST[kind], multiple=_MULTIPLE[kind]
        )

    def _captured(self, state: State, value: int) -> State:
        program = state.job.program.with_option(self.knob.option, value)
        made_for = Fingerprint(command=[program.name, *program.argv])
        changed = replace(state, job=replace(state.job, program=program))
        return changed.trying(made_from=made_for, arguments=None)

    def _fits(self, value: int) -> bool:
        self.state.job.search.say(f"trying {self.knob.option} {value}", _USUAL_CAPTURES)
        self.begin(2)
        try:
            found = self._captured(self.state, value)
        except CaptureFailedError as error:
            self.failed[value] = error.outcome.reason
            return False
        self.seen[value] = found.verdict
        return found.fits

    def _change(self, value: int) -> Change:
        program = self.state.job.program.with_option(self.knob.option, value)
        return captured_change(
            self.state,
            self.seen[value],
            "this value",
            kind=self.knob.kind,
            option=self.knob.option,
            before=self.knob.value,
            after=value,
            command=program.command,
        )


def _is_sharded(state: State) -> bool:
    """Whether a rank keeps gradients of its own part of the weights only, and so their state."""
    return any(
        "reduce_scatter" in one.collectives for one in state.captured.trace.meta.communicators
    )


def _sharded(base: State, lowest: State) -> tuple[Change | None, str]:
    """The fewest GPUs over which the optimizer's state has to be spread, without recomputation
    where that is enough."""
    if not (base.captured.trace.storages.role == Role.OPTIMIZER_STATE).any():
        return None, "no optimizer state was seen on the card that could be sharded"
    states = [base] if lowest is base else [base, lowest]
    for gpus in _GPUS:
        for state in states:
            found = judge(shard_optimizer(state.captured.trace, gpus), state.job.profile)
            if found.fits:
                return _shards(found, gpus, recompute=state is not base), ""
    needs = peak_text(found.estimate)
    return None, f"the optimizer's state over {_GPUS[-1]} GPUs is not enough: each needs {needs}"


def _shards(verdict: Verdict, gpus: int, *, recompute: bool) -> Change:
    found = verdict.estimate
    trace = "the trace captured with the least-peak plan" if recompute else "the captured trace"
    return Change(
        kind="sharded_optimizer",
        option="",
        before=1,
        after=gpus,
        fits=True,
        peak_bytes=found.peak_bytes,
        low_bytes=found.low_bytes,
        high_bytes=found.high_bytes,
        recompute=recompute,
        alloc_conf=verdict.alloc_conf,
        verified=f"{trace}, its optimizer state divided by {gpus}; no collectives' buffers counted",
    )
