"""The time of a training step, from a captured trace."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from memplan.timing.classes import short
from memplan.timing.collectives import (
    collective_kind,
    collective_seconds,
    is_collective,
    message_bytes,
    nodes_of,
    span,
)
from memplan.timing.host import host_seconds
from memplan.timing.seconds import (
    by_operator,
    kernel_seconds,
    moves_state,
    op_seconds,
    over_link,
    peak_rates,
)
from memplan.timing.table import KernelTimes, kernel_times
from memplan.timing.timeline import SteadyRun, steady_run
from memplan.timing.workload import Workload, workload
from memplan.types.device import DeviceProfile
from memplan.types.op_names import GRAPH_REPLAY
from memplan.types.step_graph import F64, Bools
from memplan.types.step_time import CollectiveTime, InputTime, StepTime
from memplan.types.trace import Trace

COMMUNICATION = "communication"
REPLAYS = "CUDA graphs"
_GROUPS = (
    ("matmul", "matrix products"),
    ("conv", "convolutions"),
    ("depthwise", "convolutions"),
    ("attention", "attention"),
    ("batch_norm", "normalisation"),
    ("layer_norm", "normalisation"),
    ("group_norm", "normalisation"),
    ("softmax", "softmax"),
    ("foreach", "optimizer"),
    ("fused_optimizer", "optimizer"),
    ("inductor", "compiled kernels"),
    ("copy", "copies"),
    ("transpose", "copies"),
    ("join", "copies"),
    ("index", "indexing"),
    ("scatter", "indexing"),
    ("pool", "pooling"),
    ("reduction", "reductions"),
    ("", "pointwise"),
)
"""Groups for the report, by the beginning of a class's name."""


def steady_ops(trace: Trace) -> tuple[int, int]:
    """The operators of the step that stands for the rest of the run, or of several where they take
    turns: as the capture says, else the last step but one, which is whole."""
    step = trace.ops.step
    first, last = trace.meta.steady_steps or (max(int(step.max(initial=0)) - 1, 0), None)
    stop = first + 1 if last is None else last
    rows = np.flatnonzero((step >= first) & (step < stop))
    return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)


@dataclass(frozen=True)
class PricedStep:
    """The operators `[start, stop)` of a steady step, or of several that take turns, with their
    times. Arrays are by operator; seconds."""

    trace: Trace
    start: int
    stop: int
    steps: int
    work: Workload
    each: F64
    """Seconds of each kernel of the workload."""
    device: F64
    """Seconds of each operator on its stream."""
    exchanges: Bools
    """Whether it is a collective."""
    replays: Bools
    """Whether it is a CUDA graph that runs again."""
    host: F64
    run: SteadyRun
    table: KernelTimes

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def without(self, dropped: Bools) -> float:
        """By how much the run would be shorter if these operators took no time on the device."""
        left = np.where(dropped, 0.0, self.device)
        run = steady_run(self.trace, self.start, self.stop, left, self.host)
        return max(self.run.seconds - run.seconds, 0.0)


def priced_step(
    trace: Trace, profile: DeviceProfile, table: KernelTimes | None = None
) -> PricedStep | None:
    """None for a trace without an optimizer step, or without operators: then nothing is known of a
    step."""
    table = table or kernel_times()
    start, stop = steady_ops(trace)
    if stop <= start or not trace.meta.optimizer_steps or not trace.ops.moved_bytes.any():
        return None
    first, last = trace.meta.steady_steps or (0, 1)
    work = workload(trace, profile.sm_count, start, stop)
    each = kernel_seconds(work, profile, table)
    sent = _communication(trace, start, stop, profile, table)
    again = _replayed(trace, start, stop, profile)
    device = np.select([sent >= 0, again >= 0], [sent, again], by_operator(work, each))
    device[moves_state(trace)[start:stop]] = 0.0
    host = host_seconds(trace, table.host, start, stop)
    return PricedStep(
        trace=trace,
        start=start,
        stop=stop,
        steps=max(last - first, 1),
        work=work,
        each=each,
        device=device,
        exchanges=sent >= 0,
        replays=again >= 0,
        host=host,
        run=steady_run(trace, start, stop, device, host),
        table=table,
    )


def step_time(
    trace: Trace, profile: DeviceProfile, table: KernelTimes | None = None
) -> StepTime | None:
    """The steady step's time on a card; None as `priced_step`."""
    priced = priced_step(trace, profile, table)
    if priced is None:
        return None
    steps, moving, seconds = priced.steps, priced.exchanges, priced.run.seconds
    exposed = priced.without(moving) / steps if moving.any() else None
    inputs, late = _input(trace.meta.inputs, seconds / steps)
    flops, peak, peak_name = _model_flops(trace, priced.start, priced.stop, profile)
    low, high = priced.table.bounds(profile)
    return StepTime(
        seconds=seconds / steps,
        low_seconds=seconds * low / steps,
        high_seconds=seconds * high / steps,
        host_seconds=float(priced.host.sum()) / steps,
        exposed_communication_seconds=exposed,
        input_seconds=inputs,
        exposed_input_seconds=late,
        model_flops_utilisation=flops / peak / seconds if flops else None,
        peak_rate=peak_name,
        kernel_seconds={
            name: total / steps
            for name, total in sorted(_by_kind(priced).items(), key=_by_time)
            if total
        },
    )


def _input(loaders: list[InputTime], step: float) -> tuple[float | None, float | None]:
    """Seconds of a step's batches, and those that are left when workers have prepared them beside
    a step of so many seconds."""
    if not loaders:
        return None, None
    takes = [one.batch_seconds * one.batches for one in loaders]
    late = [
        max(seconds / one.workers - step, 0.0) if one.workers else seconds
        for one, seconds in zip(loaders, takes, strict=True)
    ]
    return sum(takes), sum(late)


def state_wait(trace: Trace, profile: DeviceProfile) -> float | None:
    """Seconds by which a step is longer than its operators because optimizers' state passes the
    link to the host; None as `priced_step`, and where none does."""
    priced = priced_step(trace, profile)
    if priced is None or not (moving := moves_state(trace)[priced.rows]).any():
        return None
    device = np.where(moving, over_link(trace, profile)[priced.rows], priced.device)
    run = steady_run(trace, priced.start, priced.stop, device, priced.host)
    return max(run.seconds - priced.run.seconds, 0.0) / priced.steps


def collective_times(priced: PricedStep) -> list[CollectiveTime]:
    """What a step exchanges, by kind and group, the longest first."""
    ops, strings = priced.trace.ops, priced.trace.strings
    alike: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(priced.exchanges).tolist():
        at = priced.start + row
        alike[collective_kind(strings[ops.name[at]]), *span(strings[ops.operands[at]])].append(row)
    found = []
    for (kind, ranks, local), rows in alike.items():
        mine = np.zeros(len(priced.device), bool)
        mine[rows] = True
        moved = int(ops.moved_bytes[priced.rows][mine].sum())
        found.append(
            CollectiveTime(
                kind=kind,
                ranks=ranks,
                nodes=nodes_of(ranks, local),
                count=len(rows) / priced.steps,
                bytes=round(message_bytes(kind, moved, ranks) / priced.steps),
                seconds=float(priced.device[mine].sum()) / priced.steps,
                exposed_seconds=priced.without(mine) / priced.steps,
            )
        )
    return sorted(found, key=lambda one: -one.seconds)


def _by_kind(priced: PricedStep) -> dict[str, float]:
    """Seconds of kernels by what a person reads."""
    work, moving = priced.work, priced.exchanges
    groups: dict[str, float] = defaultdict(float)
    runs = np.bincount(work.which[~moving], minlength=len(work.first) - 1)
    totals = (np.repeat(runs, np.diff(work.first)) * priced.each).tolist()
    for kind, total in zip(work.kind, totals, strict=True):
        groups[next(name for start, name in _GROUPS if kind.startswith(start))] += total
    if moving.any():
        groups[COMMUNICATION] = float(priced.device[moving].sum())
    groups[REPLAYS] = float(priced.device[priced.replays].sum())
    return groups


def _by_time(item: tuple[str, float]) -> tuple[float, str]:
    return -item[1], item[0]


def _communication(
    trace: Trace, start: int, stop: int, profile: DeviceProfile, table: KernelTimes
) -> F64:
    """Seconds of each collective; -1 for other operators."""
    ops, strings = trace.ops, trace.strings
    found = np.full(stop - start, -1.0)
    numbers = [i for i in np.unique(ops.name[start:stop]).tolist() if is_collective(strings[i])]
    for row in np.flatnonzero(np.isin(ops.name[start:stop], numbers)).tolist():
        at = start + row
        found[row] = collective_seconds(
            strings[ops.name[at]],
            strings[ops.operands[at]],
            int(ops.moved_bytes[at]),
            profile,
            table.links,
        )
    return found


def _replayed(trace: Trace, start: int, stop: int, profile: DeviceProfile) -> F64:
    """Seconds of each replay of a CUDA graph; -1 for other operators."""
    found = np.full(stop - start, -1.0)
    alike: dict[int, float] = {}
    names = [number for number, text in enumerate(trace.strings) if text == GRAPH_REPLAY]
    for row in np.flatnonzero(np.isin(trace.ops.name[start:stop], names)).tolist():
        captured = int(trace.ops.operands[start + row])
        if captured not in alike:
            first, _, last = trace.strings[captured].partition(":")
            alike[captured] = float(op_seconds(trace, profile, int(first), int(last)).sum())
        found[row] = alike[captured]
    return found


def _model_flops(
    trace: Trace, start: int, stop: int, profile: DeviceProfile
) -> tuple[float, float, str]:
    """Operations of the products, the peak rate of the dtype that most of them have, and its name.
    What a checkpointed block computes again is not the model's, and counts for nothing."""
    ops = trace.ops
    rows = start + np.flatnonzero(ops.flops[start:stop])
    rows = rows[ops.call[rows] != -2]
    if not len(rows):
        return 0.0, 1.0, ""
    by_dtype: dict[str, float] = defaultdict(float)
    for row in rows.tolist():
        text = trace.strings[ops.operands[row]]
        dtype = text.partition(":")[2].partition(":")[0] or "float32"
        grouped = short(trace.strings[ops.name[row]]) == "convolution_backward"
        by_dtype[dtype] += (
            _without_groups(text, int(ops.flops[row])) if grouped else float(ops.flops[row])
        )
    most = max(by_dtype, key=lambda name: by_dtype[name])
    return (
        sum(by_dtype.values()),
        float(peak_rates([most], profile)[0]),
        _RATE_NAMES.get(most, most),
    )


_RATE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def _without_groups(text: str, flops: int) -> float:
    """`torch.utils.flop_counter` counts the backward pass of a grouped convolution as if it had no
    groups."""
    words = text.split(" ")
    groups = int(words[9]) if len(words) > 9 and words[9].isdigit() else 1
    return flops / groups
