"""A `Fit` for a person at a terminal; the first line is the answer."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from rich.text import Text

from memplan.fit.answer import NUMBERS, Change, Fit, Lever, Priced, link_seconds
from memplan.report.notebook import box, estimate_html, folded, folded_notes, table
from memplan.report.notebook import text as escaped
from memplan.report.text import (
    WORTH_TELLING,
    clean,
    format_bytes,
    headline,
    interval_text,
    peak_text,
    seconds_text,
    shorten,
    step_line,
)
from memplan.types.device import MIB
from memplan.types.estimate import Breakdown, Estimate

_LEVERS = 8
_NAME = 36
_NUMBERS = ("", "differ by rounding", "are those of another method")
"""What losses and gradients do, for each of `NUMBERS`."""
_SAME = 0.005
"""Parts that differ by less than this fraction of the peak are not listed."""


def fit_lines(answer: Fit, next_command: str = "") -> Iterator[Text]:
    """The report's lines."""
    yield Text(verdict(answer), style="bold green" if answer.fits else "bold red")
    if answer.after is not None:
        if not answer.fits:
            yield Text(_best_plan(answer, answer.after))
        yield Text(f"without a plan: {headline(answer.before)}", style="dim")
    if step := step_line(answer.after or answer.before):
        yield Text(step + _waiting(answer))
    yield from _levers(answer)
    if answer.after is not None:
        yield from _difference(answer.before.breakdown, answer.after.breakdown)
    yield from _others(answer)
    yield from _ranks(answer)
    yield from _worth(answer)
    yield from _changes(answer)
    for text in (*answer.notes, *(answer.after or answer.before).notes):
        yield Text.assemble(("note  ", "dim"), clean(text))
    if answer.plan:
        needless = ", which changes nothing: the job fits without" if answer.after is None else ""
        yield Text(f"wrote {clean(answer.plan)}{needless}")
    if next_command:
        yield Text()
        yield Text.assemble(("next: ", "bold"), clean(next_command))


def fit_html(answer: Fit) -> str:
    """The same for a notebook: the verdict, the levers, and the changes where nothing fits."""
    levers = [
        (lever.kind, lever.name, format_bytes(lever.saved_bytes), percent(lever.added_fraction))
        for lever in answer.levers
    ]
    changes = [
        (
            change_text(change),
            format_bytes(change.peak_bytes),
            shlex.join(change.launch) or change.code,
        )
        for change in answer.changes
    ]
    shown = answer.after or answer.before
    return box(
        verdict(answer),
        answer.fits,
        f"<div>without a plan: {escaped(headline(answer.before))}</div>" if answer.after else "",
        table(levers),
        f"<div>nearest changes that fit</div>{table(changes)}" if changes else "",
        folded("with the plan" if answer.after else "the estimate", estimate_html(shown)),
        *folded_notes(answer.notes),
    )


def verdict(answer: Fit) -> str:
    """The answer in one line. Of a job of several ranks it names the one that was looked at alone:
    another may need more."""
    seen = answer.before
    alone = not (answer.ranks or seen.ranks) and (seen.world_size or 1) > 1
    return (f"rank {seen.rank} of {seen.world_size}: " if alone else "") + _verdict(answer)


def _verdict(answer: Fit) -> str:
    so_far = "" if answer.complete else " (ended early: the best so far)"
    if answer.after is None:
        return f"{headline(answer.before)}{so_far}"
    more = percent(answer.added_fraction)
    if answer.fits:
        return f"fits with a plan: {peak_text(answer.after)}, {more} time{so_far}"
    bound = "" if answer.at_most is None else f" within {percent(answer.at_most)} time"
    size = f"{answer.gpu.total_bytes // MIB} MiB"
    text = f"does not fit {size} with any plan tried{bound}: {least_card_text(answer)} would do"
    return f"{text}, or {more} time{so_far}" if answer.after.fits else f"{text}{so_far}"


def _best_plan(answer: Fit, after: Estimate) -> str:
    """What the plan that comes nearest needs, which was captured with room to spare."""
    peak = interval_text(after.low_bytes, after.peak_bytes, after.high_bytes)
    tried, more = ", ".join(answer.levers_tried), percent(answer.added_fraction)
    room = "" if after.fits else " on a card with room"
    return f"with the best plan: peak {peak}{room}, {more} time; tried: {tried}"


def least_card_text(answer: Fit) -> str:
    """`a card of 862 MiB`: rounded up, for it has to do, and as fine as to differ from the card
    that is too small."""
    return f"a card of {math.ceil((answer.least_card_bytes or 0) / MIB)} MiB"


def _waiting(answer: Fit) -> str:
    """The part of a step's time that the captured operators do not explain."""
    link = link_seconds(answer)
    if link < WORTH_TELLING * (answer.before.step_seconds or math.inf):
        return ""
    return f"; the host's link adds {seconds_text(link)}"


def _levers(answer: Fit) -> Iterator[Text]:
    if not answer.levers:
        return
    yield Text()
    shown, rest = answer.levers[:_LEVERS], answer.levers[_LEVERS:]
    for lever in shown:
        yield _lever(lever)
    if rest:
        dropped = sum(lever.saved_bytes for lever in rest)
        added = sum(lever.added_fraction for lever in rest)
        text = f"{len(rest)} more places"
        yield Text(f"             {text:<{_NAME}}{format_bytes(dropped):>26}  {percent(added)}")
    if answer.host_bytes:
        text = f"page-locked memory of the host: {format_bytes(answer.host_bytes)} a process"
        yield Text(text, style="dim")
    changes = max(NUMBERS.index(lever.numbers) for lever in answer.levers)
    if changes:
        yield Text(f"losses and gradients {_NUMBERS[changes]}", style="yellow")
    if answer.captures > 1:
        took = f"{answer.captures} captures, {answer.seconds:.0f} s"
        if answer.before.step_seconds:
            steps = answer.seconds / (answer.before.step_seconds * (1 + answer.added_fraction))
            took += f", as long as {steps:,.0f} steps"
        yield Text(
            f"time by the card's data sheet; peak of the script captured again with the plan "
            f"({took})",
            style="dim",
        )


def _others(answer: Fit) -> Iterator[Text]:
    """What stands beside the answer."""
    after = answer.after
    rows = []
    if answer.exact is not None:
        rows.append(("the same bits", answer.exact))
    if answer.least is not None and after and answer.least.peak_bytes < after.peak_bytes:
        rows.append(("least memory", answer.least))
    rows += [("frontier", point) for point in answer.frontier]
    if rows:
        yield Text()
    for name, plan in rows:
        peak = interval_text(plan.low_bytes, plan.peak_bytes, plan.high_bytes)
        more = f"{percent(plan.added_fraction)} {plan.bound}"
        kinds = ", ".join(dict.fromkeys(lever.kind for lever in plan.levers)) or "no levers"
        fits = "fits" if plan.fits else "does not fit"
        path = f"  {clean(plan.plan)}" if plan.plan else ""
        yield Text(f"  {name:<14}{peak:<32}{more:<18}{fits:<14}{kinds}{path}")


def _ranks(answer: Fit) -> Iterator[Text]:
    """The plan of each rank, where they were asked for."""
    if answer.ranks:
        yield Text()
    for row in answer.ranks:
        one = f"rank {row.rank}" + (f" and {len(row.ranks) - 1} like it" if row.ranks[1:] else "")
        peak = interval_text(row.low_bytes, row.peak_bytes, row.high_bytes)
        kinds = ", ".join(dict.fromkeys(lever.kind for lever in row.levers)) or "no levers"
        fits = "fits" if row.fits else "does not fit"
        yield Text(f"  {one:<24}{peak:<32}{percent(row.added_fraction):<10}{fits:<14}{kinds}")


def _worth(answer: Fit) -> Iterator[Text]:
    """What the plan costs and saves, where prices were given."""
    for row in answer.priced:
        plan = "with the plan" if row.plan else "without a plan"
        said = "does not fit" if not row.fits else "of an unknown step time"
        if row.step_cost is not None:
            cost = row.step_cost * 1000
            said = f"{cost:,.3f}" if cost >= 0.01 else f"{cost:.2g}"
            said += " for 1,000 steps"
        yield Text(f"  {clean(row.gpu):<14}{row.per_hour:g}/h {plan}: {said}{_paid(answer, row)}")


def _paid(answer: Fit, row: Priced) -> str:
    if row.plan or row.step_cost is None or answer.priced[0].step_cost is None:
        return ""
    if row.paid_after_steps is None:
        return ", not dearer"
    took = f"the plan ({answer.seconds:.0f} s)"
    return f"; {took} has paid for itself by step {row.paid_after_steps:,}"


def _difference(before: Breakdown, after: Breakdown) -> Iterator[Text]:
    """What the two peaks consist of, side by side: the parts that differ, and what is fixed."""
    yield Text()
    fixed = 0
    for (name, old), (_, new) in zip(before.items(), after.items(), strict=True):
        if max(old, new) and abs(new - old) < _SAME * max(before.total(), 1):
            fixed += new
        elif max(old, new):
            words = name.replace("_", " ")
            yield Text(f"  {words:<16}{format_bytes(old):>10}  ->{format_bytes(new):>10}")
    if fixed:
        yield Text(f"  {'the rest':<16}{'':>10}    {format_bytes(fixed):>10}")


def _lever(lever: Lever) -> Text:
    name = shorten(clean(lever.name), _NAME - 1)
    what = "weight" if lever.kind == "order" else "value"
    values = f"{lever.values} {what}{'s' if lever.values > 1 else ''}" if lever.values else ""
    saved = format_bytes(lever.saved_bytes) if lever.saved_bytes else ""
    return Text(
        f"  {lever.kind:<11}{name:<{_NAME}}{values:>14}{saved:>12}  {percent(lever.added_fraction)}"
    )


def _changes(answer: Fit) -> Iterator[Text]:
    if answer.fits:
        return
    yield Text()
    if answer.changes:
        yield Text("nearest changes that fit", style="bold")
    for change in answer.changes:
        peak = interval_text(change.low_bytes, change.peak_bytes, change.high_bytes)
        yield Text(f"  {clean(change_text(change)):<38}  {peak}")
        conf = f", PYTORCH_ALLOC_CONF={change.alloc_conf}" if change.alloc_conf else ""
        yield Text(f"    {change.verified}{conf}", style="dim")
        if change.launch or change.code:
            yield Text(f"    {clean(change.code or shlex.join(change.launch))}")
    if answer.tried:
        yield Text("tried in vain", style="bold")
    for text in answer.tried:
        yield Text(f"  {clean(text)}")


def change_text(change: Change) -> str:
    if change.kind == "sharded_optimizer":
        return f"optimizer state over {change.after} GPUs"
    if change.kind == "ranks":
        return f"{change.after} ranks (now {change.before})"
    if change.kind == "sharding":
        return change.option
    if change.kind in ("optimizer_8bit", "optimizer_bf16"):
        return f"an optimizer with state of {change.after} bits"
    return f"{change.option} {change.after} (now {change.before})"


def percent(fraction: float) -> str:
    """`+5.6 %`."""
    digits = 0 if fraction >= 0.095 else 1
    return f"+{fraction * 100:.{digits}f} %"
