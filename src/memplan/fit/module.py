"""`memplan.auto_checkpoint`: a module that exists, made to need less memory in training."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from memplan.capturing.module import capture_module
from memplan.capturing.options import CaptureOptions
from memplan.fit.lifetimes import with_observed_lifetimes
from memplan.phases.step_graph import plain_peak, step_graph
from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import Selection, to_part
from memplan.recompute.solve import Solver, least_peak_within
from memplan.report.text import format_bytes
from memplan.runtime.apply import AppliedToModule
from memplan.runtime.card import profile_of
from memplan.runtime.op_timing import CalledOps, HostSeconds, host_seconds
from memplan.simulate.steady_step import steady_peak, warmed
from memplan.timing.seconds import op_seconds
from memplan.types.device import DeviceProfile, find_profile, parse_size
from memplan.types.errors import InfeasibleError, UsageError
from memplan.types.plan import RecomputePart
from memplan.types.step_graph import StepGraph
from memplan.types.trace import Trace

MOST_ADDED = 1 / 3
"""One more forward pass, where backward takes twice a forward's time."""
_TIMING_SECONDS = 3.0
_SEARCHES_DIFFER = 1.01
"""A search ends by the clock: another one may end a little above the least peak of the first."""
_ATTEMPTS = 4
"""The most attempts for one budget: a captured peak may be a little above the expected one."""
_WORTH = 0.01
"""Fraction of the peak below which a selection is not worth its time, where none is asked for."""
_AMONG_EQUAL_FLOPS = 1e-4
"""Weight of time where only arithmetic counts: most operators have none."""


@dataclass(frozen=True)
class AutoCheckpoint:
    """A selection in effect on a module. Bytes are PyTorch's allocated bytes over forward and
    backward, with the module's parameters, gradients and inputs in them and no optimizer state: on
    CUDA whole blocks, as `torch.cuda.max_memory_allocated` counts them (`steady_peak`)."""

    part: RecomputePart
    plain_peak_bytes: int
    peak_bytes: int
    """Promised: captured again with the selection in effect. Workspaces of cuDNN's convolutions
    are expected ones (docs/kernels.md): cuDNN chooses when it runs."""
    peak_high_bytes: int
    """The peak with the largest workspaces that cuDNN may choose."""
    added_fraction: float
    """Expected time added, as a fraction of forward and backward."""
    _applied: AppliedToModule | None

    def __str__(self) -> str:
        plain, peak = format_bytes(self.plain_peak_bytes), format_bytes(self.peak_bytes)
        if not self.part.groups:
            return f"peak {plain} as it is: nothing is dropped"
        text = f"peak {plain} -> {peak}, about +{self.added_fraction:.0%} time"
        if self.peak_high_bytes > (1 + _WORTH) * self.peak_bytes:
            text += f"; {format_bytes(self.peak_high_bytes)} if cuDNN takes its largest workspaces"
        return text

    def remove(self) -> None:
        """Take it off the module again."""
        if self._applied is not None:
            self._applied.remove()


def auto_checkpoint(
    module: torch.nn.Module,
    *sample: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    output_held: bool = True,
    budget: int | str | None = None,
    most_added: float = MOST_ADDED,
    cost: Literal["time", "flops"] = "time",
    gpu: str | None = None,
    search_seconds: float = 20.0,
) -> AutoCheckpoint:
    """Drop activations of an unmodified module in training and recompute them, eagerly.

    `sample`: inputs of the shapes to plan for, as `module(*sample)` takes them (a single mapping:
    `module(**sample)`). `loss` makes a scalar of the output; None: the output's `.loss`, else the
    sum of its floats. `output_held`: the program still has the output while backward runs, as after
    `output = module(x); loss(output).backward()`, and not after `loss(module(x)).backward()`; a
    language model's logits are large. `budget`: bytes, or a size such as "8GiB", that the peak of
    forward and backward (`AutoCheckpoint.peak_bytes`) must not exceed, at the least added time;
    None: the least peak that adds no more than `most_added` of the time of forward and backward.
    `gpu` names a card whose data sheet prices the operators; None: they are timed, one by one, on
    the module's own device. `cost="flops"` counts their arithmetic alone, as PyTorch's activation
    memory budget does.
    `search_seconds` is the longest that a search takes.

    Losses, gradients and buffers stay the same bits as without it, on deterministic kernels. Any
    other input shapes work too; the promise is for the sample's.

    Raises UsageError for what is no module or a budget that is no size, InfeasibleError (with the
    least possible peak) for one that cannot be met, CaptureError when the step cannot be captured.
    The module is then as before.
    """
    _check_module(module)
    limit = parse_size(budget) if isinstance(budget, str) else budget
    if limit is not None and (type(limit) is not int or limit <= 0):
        raise UsageError(f"a budget of {limit!r}", 'whole bytes, or a size such as "8GiB"')
    if cost not in ("time", "flops"):
        raise UsageError(f"cost={cost!r}", "time or flops")
    if not most_added >= 0:
        raise UsageError(f"most_added={most_added}", "a fraction of the step's time, such as 0.3")
    profile = find_profile(gpu) if gpu is not None else _profile_of(module)
    args, kwargs = (
        ((), dict(sample[0]))
        if len(sample) == 1 and isinstance(sample[0], Mapping)
        else (sample, {})
    )
    with torch.inference_mode(False), torch.enable_grad():
        planner = _Planner(module, args, kwargs, loss, output_held, profile, search_seconds)
        planner.prepare("device" if cost == "time" and gpu is None else cost)
        plan = planner.plan(limit, most_added)
    part = plan.part
    applied = AppliedToModule(module, part) if part.groups else None
    return AutoCheckpoint(
        part, planner.plain_bytes, part.peak_bytes, plan.high_bytes, plan.added, applied
    )


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{type(module).__name__} is no torch.nn.Module", "a module to train")
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise UsageError(f"{lazy[0]} has no shape yet", "module(*sample) once, which gives it one")


def _profile_of(module: torch.nn.Module) -> DeviceProfile:
    """The profile of the card that the module is on."""
    return profile_of(next((p.device for p in module.parameters() if p.is_cuda), None))


@dataclass(frozen=True)
class _Plan:
    part: RecomputePart
    """The plan, with its peak as captured again."""
    high_bytes: int
    added: float
    """The fraction of time that it adds."""


class _Planner:
    """One module, one sample: captures, solves, and captures again with what was found."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
        output_held: bool,
        profile: DeviceProfile,
        search_seconds: float,
    ) -> None:
        def capture(
            within: Callable[[torch.nn.Module], AppliedToModule] | None = None,
            on_op: CalledOps | None = None,
        ) -> Trace:
            options = CaptureOptions(profile=profile)
            try:
                return warmed(
                    capture_module(
                        module,
                        args,
                        kwargs,
                        options,
                        loss=loss,
                        output_held=output_held,
                        within=within,
                        on_op=on_op,
                    )
                )
            finally:
                gc.collect()  # with the last fake tensor PyTorch's classes are as they were

        self._capture = capture
        self._profile = profile
        self._seconds = search_seconds
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._fixed_seconds = 0.0
        """Seconds that any plan adds, whatever it drops."""

    def prepare(self, cost: Literal["device", "time", "flops"]) -> None:
        """Capture the step as it is. Its operators cost what they take on the module's own
        `device`, the `time` that the profile expects, or their `flops`."""
        called = CalledOps()
        trace = self._capture(on_op=called)
        seconds = op_seconds(trace, self._profile)
        if cost == "device":
            seconds = called.seconds(seconds, self._device, _TIMING_SECONDS)
        elif cost == "flops":
            rate = self._profile.peak_flops["fp32"]
            seconds = trace.ops.flops / rate + _AMONG_EQUAL_FLOPS * seconds
        self._graph = step_graph(trace, self._profile, seconds=seconds)
        self._plain_seconds = self._graph.plain_seconds
        if cost == "device":
            self._add_host_seconds(host_seconds(self._device))
        self.plain_bytes, self._plain_high = _peaks(trace, self._graph)
        self._rests = self.plain_bytes - plain_peak(self._graph)

    def _add_host_seconds(self, host: HostSeconds) -> None:
        """What a plan costs the host. On CUDA it runs ahead, and the step takes the longer of its
        time and the kernels'."""
        ops = int((self._graph.ops.seconds[: self._graph.forward_ops] > 0).sum())
        recorded = self._plain_seconds + ops * host.recorded
        if self._device.type == "cuda":
            recorded = max(self._plain_seconds, ops * (host.plain + host.recorded))
            self._plain_seconds = max(self._plain_seconds, ops * host.plain)
        self._fixed_seconds = recorded - self._plain_seconds
        if self._fixed_seconds or self._device.type != "cuda":  # the step waits for its host
            self._graph = self._graph.with_replay_overhead(host.replayed)

    def plan(self, limit: int | None, most_added: float) -> _Plan:
        """The one with the least peak, or the quickest within a limit."""
        if limit is not None and limit >= self.plain_bytes:
            return self._nothing(limit)
        if limit is None:
            return self._lowest_within(most_added)
        # A guess that saves a search: fewer bytes leave less beside them, though more for each.
        target = limit - int(self._rests * math.sqrt(limit / self.plain_bytes))
        for _ in range(_ATTEMPTS):
            selection = Solver().solve(self._graph, target, deadline_seconds=self._seconds).best
            if selection is None:
                break
            plan = self._verified(selection, limit)
            if plan.part.peak_bytes <= limit:
                return plan
            target = limit - self._unexplained(selection, plan.part.peak_bytes)
            if target <= 0:
                break
        lowest = Solver().least_peak(self._graph, deadline_seconds=self._seconds).solution
        plan = self._verified(lowest, limit)
        least = plan.part.peak_bytes
        if least <= limit:
            return plan
        again = math.ceil(least * _SEARCHES_DIFFER)
        raise InfeasibleError(
            f"no selection found keeps the peak within {format_bytes(limit)}; the least found is "
            f"{format_bytes(least)} (it is {format_bytes(self.plain_bytes)} without any)",
            f"budget={again}, a smaller batch or shorter sequences",
        )

    def _unexplained(self, selection: Selection, captured_peak: int) -> int:
        """Bytes by which a captured peak exceeds what is expected after it was learned from. Where
        a value turned out not to be droppable, only the unused rest of blocks counts: the next
        selection does not drop that value."""
        if not self._graph.values.droppable[list(selection.dropped)].all():
            return self._rests
        return max(0, captured_peak - evaluate(self._graph, selection).peak_bytes)

    def _nothing(self, limit: int) -> _Plan:
        part = RecomputePart(groups=[], budget_bytes=limit, peak_bytes=self.plain_bytes)
        return _Plan(part, self._plain_high, 0.0)

    def _lowest_within(self, most_added: float) -> _Plan:
        """Planned on the graph as it was captured, then on what a capture with that plan showed."""
        plans = []
        most = most_added * self._plain_seconds - self._fixed_seconds
        if most < 0:
            return self._nothing(0)
        for _ in range(2):
            graph, seconds = self._graph, self._seconds / 2
            share = most / graph.plain_seconds
            found = least_peak_within(graph, share, deadline_seconds=seconds)
            plans.append(self._verified(found.solution, 0))
            if self._graph is graph:
                break
        best = min(plans, key=lambda plan: plan.part.peak_bytes)
        if best.part.peak_bytes > (1 - _WORTH) * self.plain_bytes:
            return self._nothing(0)
        return best

    def _verified(self, selection: Selection, budget: int) -> _Plan:
        """The plan as captured again. The graph learns from it."""
        figures = evaluate(self._graph, selection)
        added_seconds = figures.added_seconds + self._fixed_seconds

        def part(peak_bytes: int) -> RecomputePart:
            return to_part(
                self._graph,
                selection,
                budget_bytes=budget,
                peak_bytes=peak_bytes,
                added_seconds=added_seconds,
            )

        first = part(figures.peak_bytes)
        trace = self._capture(lambda copy: AppliedToModule(copy, first))
        observed = step_graph(trace, self._profile)
        self._graph = with_observed_lifetimes(self._graph, observed, selection.dropped)
        peak, high = _peaks(trace, observed)
        self._rests = peak - plain_peak(observed)
        return _Plan(part(peak), high, added_seconds / self._plain_seconds)


def _peaks(trace: Trace, graph: StepGraph) -> tuple[int, int]:
    """Expected, and with the largest workspaces that kernels may choose."""
    if trace.meta.method != "cuda":  # no caching allocator
        return (plain_peak(graph),) * 2
    return steady_peak(trace), steady_peak(trace, "high")
