"""The parts of a plan that act in a running program, put into effect around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from memplan.types.plan import Plan


@contextmanager
def plan_in_effect(
    plan: Plan, command: list[str], on_note: Callable[[str], None]
) -> Iterator[None]:
    """Recomputation and early weight updates, where the plan has them. `command`: the program's
    name and arguments. `on_note` is told, in a sentence, what of the plan cannot be followed."""
    with ExitStack() as stack:
        if plan.recompute is not None and plan.recompute.groups:
            from memplan.runtime.apply import AppliedEverywhere

            stack.enter_context(AppliedEverywhere(plan.recompute, on_note))
        if plan.order is not None:
            from memplan.runtime.early import EarlyUpdates

            same = plan.made_from.command == command
            stack.enter_context(EarlyUpdates(plan.order, on_note, same_job=same))
        yield
