"""Changes of how a job of many processes is sharded, each captured: more ranks, and switches of the
script such as `--reshard`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memplan.fit.answer import Change
from memplan.fit.judge import Verdict, lowers
from memplan.fit.micro_batches import input_bytes
from memplan.fit.options import find_switches
from memplan.fit.state import MoreNodes, State
from memplan.report.text import peak_text
from memplan.types.plan import Fingerprint
from memplan.worker.failure import CaptureFailedError

_TIMES = (2, 4, 8)
_MIDDLE = 1
"""Tried first: two captures tell which of three is the least that fits."""
_SHARDING = frozenset(
    {
        *("reshard", "reshard_after_forward", "fsdp_reshard_after_forward", "full_shard", "zero3"),
        *("cpu_offload", "fsdp_cpu_offload", "offload_policy", "offload_params"),
    }
)
"""Names of switches with which a rank holds less of the model."""
_SAME = 0.01


def more_ranks(lowest: State) -> tuple[Change | None, str]:
    """The job on 2, 4 or 8 times as many nodes, the fewest that fit; or why there is none. Nothing
    where a job is not one of ranks, and where one of more ranks needs as much on each: it shards
    nothing.

    `lowest`: with the plan of the least peak in effect, which stays.
    """
    tried: dict[int, tuple[MoreNodes, State]] = {}
    for place in (_MIDDLE, _MIDDLE - 1, _MIDDLE + 1):
        middle = tried.get(_TIMES[_MIDDLE])
        if middle is not None and middle[1].fits != (place < _MIDDLE):
            continue
        wider = lowest.job.more_nodes(_TIMES[place])
        if wider is None:
            break
        lowest.job.search.say(f"trying {wider.ranks} ranks", 3)
        try:
            found = replace(lowest, job=replace(lowest.job, capture=wider.capture)).trying()
        except CaptureFailedError as error:
            return None, f"{wider.ranks} ranks could not be captured: {error.outcome.reason}"
        if not lowers(lowest.verdict, found.verdict):
            return None, ""
        tried[_TIMES[place]] = wider, found
    fitting = [one for _, one in sorted(tried.items(), key=lambda item: item[0]) if one[1].fits]
    if fitting:
        return _of_ranks(lowest, *fitting[0]), ""
    if not tried:
        return None, ""
    wider, found = tried[max(tried)]
    needs = peak_text(found.verdict.estimate)
    return None, f"{wider.ranks} ranks are not enough: each needs {needs}"


def with_switches(lowest: State) -> tuple[list[Change], list[str]]:
    """Switches of the script that shard more and are not on, each alone, that make it fit; and what
    was tried in vain."""
    changes, tried = [], []
    for switch in find_switches(lowest.job.program, _SHARDING):
        program = switch.on(lowest.job.program)
        words = switch.words(on=True)
        lowest.job.search.say(f"trying {words}", 3)
        made_for = Fingerprint(command=program.command)
        changed = replace(lowest, job=replace(lowest.job, program=program))
        try:
            found = changed.trying(made_from=made_for, arguments=None).verdict
        except CaptureFailedError as error:
            tried.append(f"{words} could not be captured: {error.outcome.reason}")
            continue
        if not found.fits:
            tried.append(f"{words} is not enough: {peak_text(found.estimate)}")
            continue
        changes.append(
            captured_change(
                lowest,
                found,
                "it",
                kind="sharding",
                option=words,
                before=0,
                after=1,
                command=program.command,
            )
        )
    return changes, tried


def captured_change(state: State, found: Verdict, what: str, **fields: Any) -> Change:
    """A change with which the job, captured again with `what`, and with the plan of `state` still
    in effect, fits."""
    plan, estimate = state.plan, found.estimate
    recomputes = plan.recompute is not None or plan.regions is not None
    effect = " and ".join(lever.name for lever in state.levers)
    if recomputes:
        effect = "the least-peak plan"
    return Change(
        fits=True,
        peak_bytes=estimate.peak_bytes,
        low_bytes=estimate.low_bytes,
        high_bytes=estimate.high_bytes,
        recompute=recomputes,
        alloc_conf=found.alloc_conf,
        verified=f"captured with {what} and {effect}" if effect else f"captured with {what}",
        **fields,
    )


def _of_ranks(lowest: State, wider: MoreNodes, found: State) -> Change:
    before, after = input_bytes(lowest.captured.trace), input_bytes(found.captured.trace)
    what = f"{wider.ranks} ranks"
    if before and abs(after - before) <= _SAME * before:
        times = wider.ranks // lowest.job.ranks
        what += f" (an update takes {times} times the samples, as many on each rank as before)"
    return captured_change(
        lowest,
        found.verdict,
        what,
        kind="ranks",
        option="",
        before=lowest.job.ranks,
        after=wider.ranks,
        launch=list(wider.command),
    )
