"""The nearest changes of a job with which it fits, each verified by an estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from memplan import __version__
from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Change
from memplan.fit.judge import Verdict, judge
from memplan.fit.knobs import Kind, Knob, find_knobs
from memplan.fit.options import set_option
from memplan.fit.plans import Planned
from memplan.fit.what_if import shard_optimizer
from memplan.report.text import peak_text
from memplan.types.device import DeviceProfile
from memplan.types.estimate import Estimate
from memplan.types.plan import Fingerprint, OrderPart, Plan, RegionsPart
from memplan.types.trace import Role
from memplan.worker.captures import Captured, CaptureProgram
from memplan.worker.failure import CaptureFailedError

_WORDS: dict[Kind, str] = {
    "batch_size": "batch size",
    "sequence_length": "sequence length",
    "image_size": "image size",
}
_LEAST: dict[Kind, int] = {"batch_size": 1, "sequence_length": 16, "image_size": 32}
_MULTIPLE: dict[Kind, int] = {"batch_size": 1, "sequence_length": 8, "image_size": 32}
_REFINEMENTS = 2
_GPUS = (2, 4, 8)


def nearest_changes(
    program: ScriptTarget,
    plain: Captured,
    lowest: Planned | None,
    profile: DeviceProfile,
    capture: CaptureProgram,
    progress: Callable[[str], None],
    order: OrderPart | None = None,
    regions: RegionsPart | None = None,
) -> tuple[list[Change], list[str]]:
    """Changes that fit, nearest first, and sentences about what was tried in vain.

    `lowest`: the plan with the least peak, which is kept in effect: operators are named by their
    place in the step, so it serves other shapes as well. `order`, `regions`: in effect in `plain`
    and in `lowest`, and kept as well.
    """
    changes: list[Change] = []
    tried: list[str] = []
    missing: list[str] = []
    knobs = {knob.kind: knob for knob in find_knobs(program)}
    reference = lowest.verdict.estimate if lowest else plain.estimate
    for kind, words in _WORDS.items():
        if kind not in knobs:
            missing.append(words)
            continue
        plan = None
        if lowest or order or regions:
            part = lowest.part if lowest else None
            plan = Plan(memplan_version=__version__, recompute=part, order=order, regions=regions)
        search = _KnobSearch(program, knobs[kind], plan, profile, capture, progress)
        change, reason = search.run(_share(reference, profile))
        changes += [change] if change else []
        tried += [reason] if reason else []
    if missing:
        words = " or ".join(missing)
        tried.append(f"no option for the {words} was found in {program.name} or after it")
    changes.sort(key=lambda change: -change.after / change.before)
    sharded, reason = _sharded(plain, lowest, profile)
    changes += [sharded] if sharded else []
    tried += [reason] if reason else []
    return changes, tried


def largest_fitting(
    value: int, share: float, fits: Callable[[int], bool], *, least: int = 1, multiple: int = 1
) -> int | None:
    """The largest of value/2, value/4, … not below `least` for which `fits`, by bisection, then
    refined at most twice between it and the next larger one, in multiples of `multiple`.

    `share`: the fraction of `value` that is expected to fit; it only decides what is asked first.
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
        probe = (low + high) // 2
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


def _share(reference: Estimate, profile: DeviceProfile) -> float:
    """The fraction of the batch that should fit, were all but parameters, gradients, optimizer
    state and context in proportion to it."""
    parts = reference.breakdown
    fixed = parts.parameters + parts.gradients + parts.optimizer_state
    fixed += profile.context_high_bytes
    moving = max(reference.high_bytes - fixed, 1)
    return (profile.total_memory_bytes - fixed) / moving


@dataclass
class _KnobSearch:
    """Captures the program with smaller values of one option."""

    program: ScriptTarget
    knob: Knob
    plan: Plan | None
    profile: DeviceProfile
    capture: CaptureProgram
    progress: Callable[[str], None]
    seen: dict[int, Verdict] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def run(self, share: float) -> tuple[Change | None, str]:
        """The change, or why there is none."""
        kind, option = self.knob.kind, self.knob.option
        value = largest_fitting(
            self.knob.value, share, self._fits, least=_LEAST[kind], multiple=_MULTIPLE[kind]
        )
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

    def _fits(self, value: int) -> bool:
        self.progress(f"trying {self.knob.option} {value}")
        program = set_option(self.program, self.knob.option, value)
        made_for = Fingerprint(command=[program.name, *program.argv])
        plan = msgspec.structs.replace(self.plan, made_from=made_for) if self.plan else None
        try:
            captured = self.capture(program, plan, quiet=True)
        except CaptureFailedError as error:
            self.failed[value] = error.outcome.reason
            return False
        found = self.seen[value] = judge(captured.trace, self.profile, captured.estimate)
        return found.fits

    def _change(self, value: int) -> Change:
        program = set_option(self.program, self.knob.option, value)
        found = self.seen[value].estimate
        how = "captured with this value"
        return Change(
            kind=self.knob.kind,
            option=self.knob.option,
            before=self.knob.value,
            after=value,
            fits=True,
            peak_bytes=found.peak_bytes,
            low_bytes=found.low_bytes,
            high_bytes=found.high_bytes,
            recompute=self.plan is not None and _recomputes(self.plan),
            alloc_conf=self.seen[value].alloc_conf,
            verified=f"{how} and {_in_effect(self.plan)}" if self.plan else how,
            command=[program.name, *program.argv],
        )


def _in_effect(plan: Plan) -> str:
    return "the least-peak plan" if _recomputes(plan) else "updates in backward"


def _recomputes(plan: Plan) -> bool:
    return plan.recompute is not None or plan.regions is not None


def _sharded(
    plain: Captured, lowest: Planned | None, profile: DeviceProfile
) -> tuple[Change | None, str]:
    """The fewest GPUs over which the optimizer's state has to be spread, without recomputation
    where that is enough."""
    if not (plain.trace.storages.role == Role.OPTIMIZER_STATE).any():
        return None, "the optimizer keeps no state that could be sharded"
    captured = [plain, lowest.captured] if lowest else [plain]
    for gpus in _GPUS:
        for job in captured:
            found = judge(shard_optimizer(job.trace, gpus), profile)
            if found.fits:
                return _shards(found, gpus, recompute=job is not plain), ""
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
