"""The page of each kind of file that `memplan report` takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from memplan.cli.answers import read_json_answer
from memplan.cli.files import is_json
from memplan.fit.answer import Alternative, Fit, Lever
from memplan.fit.text import change_text, percent, verdict
from memplan.report.html.page import Frontier, Page, Point, across, estimate_page, height, scale
from memplan.report.html.picture import Picture
from memplan.report.html.planned import planned_job
from memplan.report.html.streams import step_section
from memplan.report.html.tree import rows_of_answer, rows_of_trace, tree
from memplan.report.replayed import replayed
from memplan.report.text import format_bytes, headline, interval_text
from memplan.timing.step import priced_step
from memplan.types.device import DEFAULT_PROFILE, DeviceProfile, captured_for
from memplan.types.errors import UsageError
from memplan.types.estimate import Estimate
from memplan.types.plan import AllocationPart, Plan
from memplan.types.plan_file import load_plan
from memplan.types.trace import Trace


def page_of(path: Path, profile: DeviceProfile | None) -> Page:
    """What a file says. Raises UsageError, FormatError and NoAnswerError as its readers do."""
    if not is_json(path):
        return _trace_page(path, profile)
    if profile is not None:
        raise UsageError("--gpu with an answer or a plan, which has a card", "leave --gpu out")
    if _is_plan(path):
        return _plan_page(load_plan(path), path.name)
    answer = read_json_answer(path)
    return (
        _fit_page(answer, path.name) if isinstance(answer, Fit) else _answer_page(answer, path.name)
    )


def _is_plan(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"made_from"' in file.read(4096)


def _trace_page(path: Path, profile: DeviceProfile | None) -> Page:
    from memplan.capturing.importers.load_any import load_any
    from memplan.estimation import estimate
    from memplan.simulate.replay import with_start

    trace = with_start(load_any(path))
    card = captured_for(trace.meta.gpu)
    if profile is None and card.name == trace.meta.gpu != DEFAULT_PROFILE:  # somebody chose it
        profile = card
    answer = estimate(trace, profile)
    page = estimate_page(answer, path.name)
    room = answer.gpu.total_bytes - answer.gpu.context_bytes if answer.gpu else None
    _draw(page, trace, room)
    _draw_step(page, trace, profile or card)
    return page


def _draw(page: Page, trace: Trace, room_bytes: int | None) -> None:
    if len(trace):
        whole, timeline = replayed(trace, device=int(trace.events.device[0]))
        page.tables = Picture(whole, timeline).tables(room_bytes=room_bytes)
        page.tree = tree(rows_of_trace(whole, timeline))


def _draw_step(page: Page, trace: Trace, card: DeviceProfile) -> None:
    priced = priced_step(trace, card)
    page.step = None if priced is None else step_section(priced, card.device_name)
    if page.step is not None:
        page.tables["step"] = page.step.table


def _answer_page(answer: Estimate, title: str) -> Page:
    page = estimate_page(answer, title)
    page.tree = tree(rows_of_answer(answer))
    return page


def _fit_page(answer: Fit, title: str) -> Page:
    page = _answer_page(answer.after or answer.before, title)
    page.verdict = verdict(answer)[:1].upper() + verdict(answer)[1:]
    page.tone = "yes" if answer.fits else "no"
    if answer.after is not None:
        page.second = f"Without a plan: {headline(answer.before)}"
    page.levers = [_lever(lever) for lever in answer.levers]
    if answer.frontier:
        page.frontier = _frontier(answer)
    page.changes_title = "" if answer.fits else "Nearest changes that fit"
    page.changes = [
        f"{change_text(change)}: peak {format_bytes(change.peak_bytes)}, {change.verified}"
        for change in answer.changes
    ]
    page.notes = [*answer.notes, *page.notes]
    return page


def _lever(lever: Lever) -> dict[str, str]:
    return {
        "kind": lever.kind,
        "name": lever.name,
        "count": str(lever.values or ""),
        "saves": format_bytes(lever.saved_bytes) if lever.saved_bytes else "",
        "adds": percent(lever.added_fraction),
    }


def _frontier(answer: Fit) -> Frontier:
    card = answer.gpu.total_bytes
    plans = answer.frontier
    most = max([card, *(plan.high_bytes for plan in plans)])
    if most > 2 * max(plan.high_bytes for plan in plans):
        most = max(plan.high_bytes for plan in plans)
    slowest = max(max(plan.added_fraction for plan in plans), 1e-9)
    points = []
    for plan in plans:
        share = 0.04 + 0.92 * plan.added_fraction / slowest
        kinds = [f"{lever.kind} {lever.name}" for lever in plan.levers]
        points.append(
            Point(
                x=across(share),
                y=height(plan.peak_bytes, most),
                low_y=height(plan.low_bytes, most),
                high_y=height(plan.high_bytes, most),
                peak=interval_text(plan.low_bytes, plan.peak_bytes, plan.high_bytes),
                adds=percent(plan.added_fraction),
                fits=plan.fits,
                levers=", ".join(dict.fromkeys(kinds)) or "no levers",
                command=_command(answer, plan),
            )
        )
    return Frontier(
        points=points,
        ticks=scale(most),
        line=" ".join(f"{point.x},{point.y}" for point in points),
        card_y=height(card, most) if card <= most else None,
    )


def _command(answer: Fit, plan: Alternative) -> str:
    """What runs a plan that was written, or else makes it."""
    job = answer.before.command
    if plan.plan:
        return shlex.join(["memplan", "run", "--plan", plan.plan, *job])
    at_most = f"{plan.added_fraction * 100 + 0.05:.1f}%"
    own = ["--gpu", answer.gpu.name, "--at-most", at_most, "-o", "job.plan"]
    return shlex.join(["memplan", "fit", *own, *job])


def _plan_page(plan: Plan, title: str) -> Page:
    part = plan.allocation
    names = [
        name for name in plan.__struct_fields__ if isinstance(getattr(plan, name), msgspec.Struct)
    ]
    holds = ", ".join(name for name in names if name != "made_from")
    page = Page(title=title, verdict="A plan", command=shlex.join(plan.made_from.command))
    page.facts = [("parts", holds or "none"), ("made by", f"memplan {plan.memplan_version}")]
    if plan.made_from.gpu:
        page.facts.append(("for", plan.made_from.gpu))
    if plan.recompute is not None:
        page.levers = [
            {
                "kind": "recompute",
                "name": g.name,
                "count": str(len(g.drop)),
                "saves": "",
                "adds": "",
            }
            for g in plan.recompute.groups
        ]
    if part is not None:
        _draw_layout(page, part)
    return page


def _draw_layout(page: Page, part: AllocationPart) -> None:
    trace, planned = planned_job(part)
    whole, timeline = replayed(trace)
    reserved = timeline.reserved_peak_bytes
    page.verdict = (
        f"Planned layout of {format_bytes(part.arena_bytes)}; "
        f"PyTorch's allocator would reserve {format_bytes(reserved)} for the same requests"
    )
    page.facts += [
        ("most bytes alive at once: no layout is lower", format_bytes(part.load_bytes)),
        ("requests", f"{part.requests:,}, of them {len(planned.storage):,} with a place"),
    ]
    page.tables = Picture(whole, timeline).tables(planned)
