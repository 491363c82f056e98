"""The figures of docs/how-it-works and of the tutorial, drawn by memplan: `make figures`.

What `memplan report` draws is photographed in Chromium. The figure of the order is drawn here, from
the bytes that a step holds at each of its operators, as `memplan.order` counts them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from bench.results import ROOT

FOLDER = ROOT / "docs" / "figures"
JOB = "examples/gpt2/train.py"
CARD = "8GiB"
STEP = "vit_b_16_1"
"""Of `bench.order`."""
COLOURS = 48
_BARE = (
    "h2, .hint { display: none } section { margin: 0; padding: 8px } "
    "#timeline { height: 260px } .maps canvas { height: 300px }"
)
_GIB = 1 << 30


def memplan(folder: Path, *words: str) -> None:
    """Raises CalledProcessError where a command finds no answer; that it does not fit is one."""
    done = subprocess.run([sys.executable, "-m", "memplan", *words], cwd=folder, check=False)
    if done.returncode not in (0, 3):
        raise subprocess.CalledProcessError(done.returncode, words)


def recordings(folder: Path) -> None:
    """The job, the same with the plan of `memplan fit` in effect, and the job's addresses."""
    (folder / "examples").symlink_to(ROOT / "examples")
    memplan(folder, "estimate", "--gpu", CARD, "-o", "plain.trace", JOB)
    memplan(folder, "fit", "--gpu", CARD, "-o", "job.plan", JOB)
    planned = ("--plan", "job.plan", "--steps", "3")
    memplan(folder, "estimate", "--gpu", CARD, *planned, "-o", "fitted.trace", JOB)
    memplan(folder, "plan", "-o", "addresses.plan", "--from-trace", "plain.trace")
    for name, card in (("plain.trace", CARD), ("fitted.trace", CARD), ("addresses.plan", "")):
        options = ("--gpu", card) if card else ()
        memplan(folder, "report", *options, "-o", f"{name}.html", name)


def photograph(page: Page, source: Path, part: str, name: str) -> None:
    """A part of a report as `docs/figures/NAME.png`, with few colours."""
    page.goto(source.as_uri())
    page.locator("html[data-painted=all]").wait_for(state="attached", timeout=120_000)
    page.add_style_tag(content=_BARE)
    page.wait_for_timeout(500)  # the figures are drawn anew in their new size
    target = FOLDER / f"{name}.png"
    page.locator(part).screenshot(path=target)
    with Image.open(target) as picture:
        picture.convert("RGB").quantize(COLOURS).save(target, optimize=True)


def order_figure() -> str:
    """An SVG: bytes held at each operator of a step, in program order and in memplan's."""
    from bench.order import step_graph
    from bench.order_jobs.models import CASES
    from memplan.order.evaluate import held, program_order
    from memplan.order.solve import solve
    from memplan.types.deadline import Deadline
    from memplan.types.solution import Solved

    case = next(case for case in CASES if case.key == STEP)
    graph, _ = step_graph(case)
    answer = solve(graph, deadline=Deadline(60))
    if not isinstance(answer, Solved):
        raise RuntimeError(f"no proven order of {STEP} in 60 s")
    program = program_order(graph)
    curves = [held(graph, program), held(graph, answer.solution.order)]
    return drawn(curves, ["program order", "order of least peak"], answer.bound)


def drawn(curves: list[Any], names: list[str], bound: float) -> str:
    """`curves`: bytes at each operator. `bound`: bytes of the proven bound."""
    width, height, left, top = 720, 260, 70, 30
    most = max(float(curve.max()) for curve in curves) * 1.05
    colours = ("#8a8f98", "#0b62c4")

    def y(nbytes: float) -> float:
        return round(top + (height - top) * (1 - nbytes / most), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 30}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height + 30}" fill="#fff"/>',
    ]
    for tick in np.arange(0, most, _GIB / 4):
        parts.append(
            f'<line x1="{left}" x2="{width - 10}" y1="{y(tick)}" y2="{y(tick)}" stroke="#d9dee5"/>'
            f'<text x="{left - 6}" y="{y(tick) + 4}" text-anchor="end">{tick / _GIB:.2f} GiB</text>'
        )
    for number, (curve, name, colour) in enumerate(zip(curves, names, colours, strict=True)):
        buckets = np.array_split(np.asarray(curve), min(len(curve), 330))
        step = (width - 10 - left) / len(buckets)
        points = " ".join(
            f"{left + step * at:.1f},{y(float(bucket.max()))}" for at, bucket in enumerate(buckets)
        )
        x = left + 10 + 190 * number
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 18}" y="18">{name}: {float(curve.max()) / _GIB:.2f} GiB</text>'
        )
    parts.append(
        f'<line x1="{left}" x2="{width - 10}" y1="{y(bound)}" y2="{y(bound)}" stroke="#b3261e" '
        'stroke-dasharray="5 4"/>'
        f'<text x="{width - 12}" y="{y(bound) - 5}" text-anchor="end" fill="#b3261e">'
        "no order has a lower peak</text>"
        f'<text x="{(left + width) / 2}" y="{height + 20}" text-anchor="middle">'
        "operators of the step, in the order in which they run</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "order.svg").write_text(order_figure(), encoding="utf-8")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        recordings(folder)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
        photograph(page, folder / "plain.trace.html", "#time", "estimate")
        photograph(page, folder / "fitted.trace.html", "#time", "fit")
        photograph(page, folder / "addresses.plan.html", "#address", "addresses")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
