"""Changes of how a job of many processes is sharded, each captured: more ranks, and options of the
script such as `--reshard` and `--zero-stage 3`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Change
from memplan.fit.judge import Verdict, lowers
from memplan.fit.micro_batches import input_bytes
from memplan.fit.options import find_switches, find_value
from memplan.fit.state import MoreNodes, State
from memplan.report.text import peak_text
from memplan.types.plan import Fingerprint
from memplan.worker.failure import CaptureFailedError

_TIMES = (2, 4, 8)
_SHARDING = frozenset(
    {
        *("reshard", "reshard_after_forward", "fsdp_reshard_after_forward", "full_shard", "zero3"),
        *("cpu_offload", "fsdp_cpu_offload", "offload_policy", "offload_params"),
        *("use_distributed_optimizer", "sequence_parallel"),
    }
)
"""Names of switches with which a rank holds less of the model or of its activations."""
_STAGES = frozenset({"zero_stage", "deepspeed_stage", "zero_optimization_stage"})
_LAST_STAGE = 3
_WIDTHS = frozenset(
    {
        *("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree"),
        *("tensor_model_parallel_size", "context_parallel_size", "context_parallel_degree"),
    }
)
"""Names of options that say over how many ranks a layer or a sequence is split."""
_SAME = 0.01


def more_ranks(lowest: State) -> tuple[Change | None, str]:
    """The job on 2, 4 or 8 times as many nodes, the fewest that fit; or why there is none. Nothing
    where a job is not one of ranks, and where one of more ranks needs as much on each: it shards
    nothing.

    `lowest`: with the plan of the least peak in effect, which stays.
    """
    job, fitting, tried = lowest.job, None, None
    context = job.profile.context_high_bytes
    needed, room = lowest.needed - context, job.profile.total_memory_bytes - context
    # What is too much when all of it is divided by the number of nodes needs no capture.
    low, high = sum(needed > times * room for times in _TIMES), len(_TIMES)
    if low == high and (most := job.more_nodes(_TIMES[-1])):
        return None, f"{most.ranks} ranks are not enough: an eighth of all a rank needs is too much"
    while low < high:
        place = (low + high) // 2
        wider = job.more_nodes(_TIMES[place])
        if wider is None:
            break
        job.search.say(f"trying {wider.ranks} ranks", 3)
        try:
            found = replace(lowest, job=replace(job, capture=wider.capture)).trying()
        except CaptureFailedError as error:
            return None, f"{wider.ranks} ranks could not be captured: {error.outcome.reason}"
        if not lowers(lowest.verdict, found.verdict):
            return None, ""
        if found.fits:
            fitting, high = (wider, found), place
        else:
            tried, low = (wider, found), place + 1
    if fitting:
        return _of_ranks(lowest, *fitting), ""
    if not tried:
        return None, ""
    wider, found = tried
    needs = peak_text(found.verdict.estimate)
    return None, f"{wider.ranks} ranks are not enough: each needs {needs}"


def with_options(lowest: State) -> tuple[list[Change], list[str]]:
    """Options of the script that shard more than they do now, each alone, that make it fit; and
    what was tried in vain. Of an option's values, the least that fits."""
    changes, tried = [], []
    for options in _sharding_more(lowest):
        said = ""
        for words, before, after, program in options:
            found = _captured(lowest, words, program)
            if isinstance(found, str):
                said = said or f"{words} could not be captured: {found}"
                continue
            if not found.fits:
                said = f"{words} is not enough: {peak_text(found.estimate)}"
                continue
            change = captured_change(
                lowest,
                found,
                "it",
                kind="sharding",
                option=words,
                before=before,
                after=after,
                command=program.command,
            )
            changes.append(change)
            break
        else:
            tried += [said] if said else []
    return changes, tried


def _sharding_more(lowest: State) -> Iterator[list[tuple[str, int, int, ScriptTarget]]]:
    """For each option: its words, value before and after, and program with the new value."""
    program = lowest.job.program
    for switch in find_switches(program, _SHARDING):
        yield [(switch.words(on=True), 0, 1, switch.on(program))]
    for names, values in (
        (_STAGES, range(1, _LAST_STAGE + 1)),
        (_WIDTHS, [width for width in _TIMES if width <= lowest.job.ranks]),
    ):
        now = find_value(program, names) if lowest.job.ranks > 1 else None
        if now is not None:
            name = now.option
            yield [
                (f"{name} {value}", now.value, value, program.with_option(name, value))
                for value in values
                if value > now.value
            ]


def _captured(lowest: State, words: str, program: ScriptTarget) -> Verdict | str:
    """The verdict of a capture with other options, or the reason why there is none."""
    lowest.job.search.say(f"trying {words}", 3)
    made_for = Fingerprint(command=program.command)
    changed = replace(lowest, job=replace(lowest.job, program=program))
    try:
        return changed.trying(made_from=made_for, arguments=None).verdict
    except CaptureFailedError as error:
        return error.outcome.reason


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
