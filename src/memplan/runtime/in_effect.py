"""The parts of a plan that act in a running program, put into effect around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from memplan.types.plan import CompiledRegion, Plan
from memplan.types.run_outcome import EarlyUpdates

_ON_ANY_DEVICE = ("recompute", "order", "regions", "loss", "grad_views", "step", "low_bit")
_OFF_THE_CARD = ("offload", "state", "frozen")
"""Parts that move a GPU's memory to the host."""


@dataclass
class InEffect:
    """What came of a plan's parts in a run."""

    in_backward: EarlyUpdates | None = None
    """None where the plan has no part `order`."""


@contextmanager
def plan_in_effect(
    plan: Plan,
    command: list[str],
    on_note: Callable[[str, str], None],
    on_found: Callable[[CompiledRegion | float], None] | None = None,
) -> Iterator[InEffect]:
    """Every part but the allocation and the arguments, where the plan has them. `command`: the
    program's name and arguments. `on_note` is told the name of a part, and in a sentence what of it
    cannot be followed; `on_found` what is done to each compiled graph, and the value that gradients
    are clipped to."""
    found = InEffect()
    same = plan.made_from.command == command
    if plan.arguments is not None and not same:
        changes = " ".join(f"{change.option} {change.value}" for change in plan.arguments.changes)
        made_for = " ".join(plan.made_from.command)
        on_note("arguments", f"{changes} is not set: the plan was made for {made_for}")
    taken = 0

    def too_little(nbytes: int) -> str:
        """Why the host has no room for these bytes of a part, beside those of the parts before."""
        nonlocal taken
        reason = _too_little(taken + nbytes)
        taken += 0 if reason else nbytes
        return reason

    with ExitStack() as stack:
        offload = plan.offload if plan.offload is not None and plan.offload.values else None
        if offload is not None and (reason := too_little(offload.host_bytes)):
            on_note("offload", f"nothing is offloaded: {reason}")
            offload = None
        if (plan.recompute is not None and plan.recompute.groups) or offload is not None:
            from memplan.runtime.apply import AppliedEverywhere

            stack.enter_context(
                AppliedEverywhere(plan.recompute, partial(on_note, "recompute"), offload)
            )
        if plan.regions is not None:
            from memplan.runtime.graph.planned import PlannedRegions

            stack.enter_context(PlannedRegions(plan.regions, partial(on_note, "regions"), on_found))
        if plan.loss is not None:
            from memplan.runtime.loss import ChunkedLoss

            stack.enter_context(ChunkedLoss(plan.loss))
        if plan.frozen is not None:
            if reason := too_little(plan.frozen.host_bytes):
                on_note("frozen", f"frozen weights stay on the card: {reason}")
            else:
                from memplan.runtime.frozen import FrozenWeights

                stack.enter_context(FrozenWeights(plan.frozen, partial(on_note, "frozen")))
        if plan.grad_views is not None:
            from memplan.runtime.grad_views import GradViews

            stack.enter_context(GradViews(partial(on_note, "grad_views")))
        if plan.order is not None:  # told of a step before those who update parameters there
            from memplan.runtime.optimizer_in_backward import OptimizerInBackward

            in_backward = OptimizerInBackward(
                plan.order,
                partial(on_note, "order"),
                same_job=same,
                exact=plan.low_bit is None,
                on_clip=on_found,
            )
            found.in_backward = in_backward.account
            stack.enter_context(in_backward)
        if plan.low_bit is not None:
            from memplan.runtime.low_bit import LowBit

            stack.enter_context(LowBit(partial(on_note, "low_bit")))
        if plan.state is not None:
            if reason := too_little(plan.state.host_bytes):
                on_note("state", f"optimizer state stays on the card: {reason}")
            else:
                from memplan.runtime.host_state import HostState

                stack.enter_context(HostState(plan.state, partial(on_note, "state")))
        if plan.step is not None:  # after those who update some parameters in another way
            from memplan.runtime.step_in_buckets import StepInBuckets

            stack.enter_context(StepInBuckets(partial(on_note, "step")))
        yield found


def without_gpu(plan: Plan) -> str:
    """A sentence about what of a plan is in effect where there is no GPU; empty where there is one,
    and where the plan has nothing of the kind."""
    if torch.cuda.device_count():
        return ""
    found = [name for name in _ON_ANY_DEVICE if getattr(plan, name) is not None]
    off = [name for name in _OFF_THE_CARD if getattr(plan, name) is not None]
    said = [f"in effect on the CPU: {', '.join(found)}"] if found else []
    said += [f"not in effect, for it moves a GPU's memory: {', '.join(off)}"] if off else []
    return f"no GPU here; of the plan, {'; '.join(said)}" if said else ""


def _too_little(nbytes: int) -> str:
    """A sentence if the host has less memory; empty if it has enough or is not the job's own."""
    from memplan.report.text import format_bytes
    from memplan.runtime.host_buffers import available_bytes, local_processes
    from memplan.runtime.tape.settings import tensors_are_fake

    available, processes = available_bytes(), local_processes()
    if tensors_are_fake() or available is None or nbytes * processes <= available:
        return ""
    each = f" for each of its {processes} processes" if processes > 1 else ""
    return (
        f"the plan needs {format_bytes(nbytes)} of the host's "
        f"memory{each}, and {format_bytes(available)} are left"
    )
