"""The page in Chromium: it paints, zooms, answers hovers and keys, and prints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, FloatRect, Locator, Page, sync_playwright

from memplan.cli import main
from memplan.estimation import estimate
from memplan.fit.choice import Limits
from memplan.layout.static_plan import plan_of, static_plan
from memplan.report.replayed import replayed
from memplan.report.text import format_bytes, seconds_text
from memplan.timing.step import collective_times, priced_step
from memplan.types.device import find_profile
from memplan.types.estimate import RankEstimate
from memplan.types.plan_file import save_plan
from memplan.types.trace import Phase, Trace
from memplan.types.trace_file import save_trace
from tests.estimation.jobs import MIB, Job, training_job
from tests.fit.test_answer import chain, found
from tests.layout.jobs import training
from tests.report.html.test_page import HOSTILE
from tests.timing.test_step import trained

ACTIVATIONS = (0x56, 0xB4, 0xE9)
COMMUNICATION = (0x7A, 0x4F, 0xB5)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must not complain on its console, nor ask for anything but its own file."""
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on(
        "request", lambda request: said.append(request.url) if request.url[:5] != "file:" else None
    )
    yield page
    page.close()
    # Our own reading of pixels is told how to be faster.
    assert [text for text in said if "willReadFrequently" not in text] == []


def opened(page: Page, source: Path, *words: str) -> None:
    target = source.with_suffix(".html")
    assert main(["report", "-f", "-o", str(target), *words, str(source)]) == 0
    page.goto(target.as_uri())
    if page.locator("canvas").count():
        page.locator("html[data-painted=all]").wait_for(state="attached")


def job(folder: Path, trace: Trace) -> Path:
    save_trace(trace, folder / "job.trace")
    return folder / "job.trace"


def known_job() -> Trace:
    """40 activations of 16 MiB, one a layer, and a large one that is the peak."""
    job = Job()
    job.at(Phase.FORWARD, "aten::mm.default", "Net.blocks.0", "net.py:7")
    kept = []
    for layer in range(40):
        job.at(Phase.FORWARD, "aten::mm.default", f"Net.blocks.{layer}", f"net.py:{7 + layer}")
        kept.append(job.alloc(16 * MIB, shape="4x1024x1024"))
    job.at(Phase.BACKWARD, "aten::mm_backward.default", "Net.blocks.39", "net.py:60")
    job.alloc(320 * MIB, shape="the-large-one")
    for storage in kept:
        job.free(storage)
    return job.build()


def box(figure: Locator) -> FloatRect:
    figure.scroll_into_view_if_needed()
    found = figure.bounding_box()
    assert found is not None
    return found


def shown(figure: Locator) -> tuple[float, float]:
    """The range of events in view."""
    figure.page.wait_for_timeout(80)
    low, high = (figure.get_attribute(f"data-{end}") for end in ("from", "to"))
    assert low is not None and high is not None
    return float(low), float(high)


def hover(figure: Locator, across: float, up: float) -> str:
    """What the box says at a place, as shares of the figure's drawing area."""
    frame = box(figure)
    margins = {"timeline": (10, 80), "blocks-map": (6, 8), "planned-map": (6, 8), "step": (6, 28)}
    top, bottom = margins[figure.get_attribute("id") or ""]
    x = frame["x"] + 74 + across * (frame["width"] - 86)
    y = frame["y"] + top + (1 - up) * (frame["height"] - top - bottom)
    figure.page.mouse.move(x - 3, y)
    figure.page.mouse.move(x, y)
    return figure.page.locator("#tip").inner_text()


def pixels(figure: Locator, across: float, colour: tuple[int, int, int]) -> int:
    """Of a column of the canvas, how many pixels have a colour."""
    box(figure)
    count: int = figure.evaluate(
        """(canvas, [across, [r, g, b]]) => {
            const scale = canvas.width / canvas.clientWidth;
            const x = Math.round((74 + across * (canvas.clientWidth - 86)) * scale);
            const column = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height).data;
            let found = 0;
            for (let i = 0; i < column.length; i += 4)
                found += column[i] === r && column[i + 1] === g && column[i + 2] === b;
            return found / scale;
        }""",
        [across, list(colour)],
    )
    return count


def test_what_is_painted_is_what_is_held(page: Page, tmp_path: Path) -> None:
    opened(page, job(tmp_path, known_job()))
    trace, timeline = replayed(known_job())
    figure = page.locator("#timeline")
    tall = 400 - 10 - 80
    top = timeline.reserved_peak_bytes * 1.04
    for event in (10, 39, 60):
        held = sum(16 * MIB for layer in range(40) if layer <= event < 41 + layer)
        # Lines of the grid cross the area.
        assert pixels(figure, (event + 0.5) / len(trace), ACTIVATIONS) == pytest.approx(
            held / top * tall, abs=9
        )


def test_hovers_name_tensor_module_and_line(page: Page, tmp_path: Path) -> None:
    opened(page, job(tmp_path, known_job()))
    said = hover(page.locator("#timeline"), 20.5 / 81, 0.1)
    for word in (
        "mm in Net.blocks.20",
        "net.py:27",
        "4x1024x1024 float32",
        "336 MiB",
        "step 0, forward",
    ):
        assert word in said
    said = hover(page.locator("#blocks-map"), 60.5 / 81, 0.1)
    assert "the-large-one" in said
    assert "320 MiB" in said
    assert "mm_backward in Net.blocks.39" in said
    assert "net.py:60" in said
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()


def test_zooming_and_moving(page: Page, tmp_path: Path) -> None:
    opened(page, job(tmp_path, training_job(steps=40)))
    figure, blocks = page.locator("#timeline"), page.locator("#blocks-map")
    whole = shown(figure)
    before = figure.screenshot()
    frame = box(figure)
    page.mouse.move(frame["x"] + frame["width"] / 2, frame["y"] + 100)
    page.mouse.wheel(0, -600)
    near = shown(figure)
    assert whole[0] < near[0] < near[1] < whole[1]
    assert shown(blocks) == near, "both figures show the same range"
    assert figure.screenshot() != before
    page.mouse.down()
    page.mouse.move(frame["x"] + frame["width"] / 2 - 200, frame["y"] + 100, steps=4)
    page.mouse.up()
    moved = shown(figure)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    figure.dblclick(position={"x": 300, "y": 100})
    assert shown(figure) == whole


def test_by_keyboard(page: Page, tmp_path: Path) -> None:
    opened(page, job(tmp_path, known_job()))
    figure = page.locator("#timeline")
    whole = shown(figure)
    figure.focus()
    page.keyboard.press("+")
    near = shown(figure)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.keyboard.press("ArrowRight")
    assert shown(figure)[0] > near[0]
    page.keyboard.press("p")
    assert "mm_backward in Net.blocks.39" in page.locator("#tip").inner_text()
    assert "mm_backward in Net.blocks.39" in page.locator("#said").inner_text()
    page.keyboard.press("Shift+ArrowLeft")
    assert "mm_backward" not in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.keyboard.press("0")
    assert shown(figure) == whole
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "blocks-map"


def test_light_dark_and_print(page: Page, tmp_path: Path) -> None:
    opened(page, job(tmp_path, known_job()))
    figure = page.locator("#timeline")
    grey = {"light": (0xCF, 0xD5, 0xDD), "dark": (0x3A, 0x43, 0x51)}

    def paper() -> str:
        shown(figure)
        colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return colour

    assert paper() == "rgb(255, 255, 255)"
    assert pixels(figure, 0.95, grey["light"]) > 50
    page.emulate_media(color_scheme="dark")
    assert paper() == "rgb(20, 24, 31)"
    assert pixels(figure, 0.95, grey["dark"]) > 50
    page.emulate_media(color_scheme="dark", media="print")
    assert paper() == "rgb(255, 255, 255)"
    assert pixels(figure, 0.95, grey["light"]) > 50
    assert page.locator(".keys").is_hidden()
    assert len(page.pdf()) > 20_000


def test_the_room_on_the_card(page: Page, tmp_path: Path) -> None:
    """A line where the card is near, none where it is far."""
    red = (0xB3, 0x26, 0x1E)
    opened(page, job(tmp_path, known_job()), "--gpu", "1700MiB")
    assert sum(pixels(page.locator("#timeline"), 0.6 + step / 300, red) for step in range(9)) > 2
    opened(page, tmp_path / "job.trace", "--gpu", "80GiB")
    assert sum(pixels(page.locator("#timeline"), 0.6 + step / 300, red) for step in range(9)) == 0


def test_the_tree_opens(page: Page, tmp_path: Path) -> None:
    opened(page, job(tmp_path, known_job()))
    root = page.locator("#peak summary").first
    assert "976 MiB" not in root.inner_text()
    assert "960 MiB" in root.inner_text()
    leaf = page.locator(".leaf", has_text="the-large-one")
    assert leaf.is_hidden()
    for name in ("39", "mm_backward"):
        page.locator("summary:visible", has_text=name).last.focus()
        page.keyboard.press("Enter")
    assert leaf.is_visible()
    assert "320 MiB" in leaf.inner_text()


def test_hostile_names_run_nothing(page: Page, tmp_path: Path) -> None:
    job_ = Job()
    for layer in range(4):
        job_.at(Phase.FORWARD, HOSTILE, f"{HOSTILE}.{layer}", HOSTILE)
        job_.alloc(64 * MIB, name=HOSTILE, shape=HOSTILE)
    opened(page, job(tmp_path, job_.build(command=[HOSTILE], notes=[HOSTILE])))
    assert "<img src=x" in hover(page.locator("#timeline"), 0.5, 0.1)
    assert "<img src=x" in hover(page.locator("#blocks-map"), 0.9, 0.1)
    assert page.locator("img").count() == 0
    assert "7 * 7" in page.locator("#peak").inner_text()


def test_a_fit_with_its_frontier(page: Page, tmp_path: Path) -> None:
    answer = found(chain("2600MiB"), Limits(frontier=True)).answer
    source = tmp_path / "fit.json"
    source.write_bytes(msgspec.json.encode(answer))
    opened(page, source)
    assert page.locator("h1").inner_text().startswith("Fits with a plan: peak ")
    assert page.locator("#frontier circle").count() == len(answer.frontier) > 1
    rows = page.locator("#levers td.number").all_inner_texts()
    values = [str(lever.values or "") for lever in answer.levers]
    assert rows[::3] == values
    commands = page.locator("#frontier code").all_inner_texts()
    assert all(command.startswith("memplan fit --gpu ") for command in commands)
    page.locator("#frontier button").first.click()
    page.locator("#frontier button", has_text="ed").first.wait_for()


def test_ranks_beside_each_other(page: Page, tmp_path: Path) -> None:
    one = estimate(training_job())
    ranks = [
        RankEstimate(
            rank=rank,
            why=f"{HOSTILE} {rank}",
            peak_bytes=one.peak_bytes * (rank + 1) // 4,
            low_bytes=0,
            high_bytes=one.high_bytes * (rank + 1) // 4,
            reserved_peak_bytes=0,
            allocated_peak_bytes=0,
            fits=rank < 3,
        )
        for rank in range(4)
    ]
    source = tmp_path / "answer.json"
    source.write_bytes(msgspec.json.encode(replace(one, ranks=ranks, rank=3, world_size=4)))
    opened(page, source)
    widths = [box(bar)["width"] for bar in page.locator("#ranks .bar .fill").all()]
    assert widths == sorted(widths) and widths[0] * 4 == pytest.approx(widths[3], rel=0.02)
    assert page.locator("#ranks .no").all_inner_texts() == ["does not fit"]
    assert page.locator("#time svg polyline").count() == 1


def test_a_step_on_its_streams(page: Page, tmp_path: Path) -> None:
    trace = trained(collective=True)
    priced = priced_step(trace, find_profile("h100"))
    assert priced is not None
    (exchanged,) = collective_times(priced)
    opened(page, job(tmp_path, trace), "--gpu", "h100")
    cells = page.locator("#collectives td").all_inner_texts()
    time = seconds_text(exchanged.seconds)
    assert cells == ["all-reduce", "among 8 ranks in 1 node", "1", "512 MiB", time, time]
    lanes = page.locator("#lanes td").all_inner_texts()
    assert lanes[:3] == ["stream 0", "kernels", "2"]
    assert lanes[5:8] == ["stream 7", "collectives", "1"]
    # The collective begins where both products have ended.
    share = 1 - exchanged.seconds / priced.run.seconds
    figure = page.locator("#step")
    assert pixels(figure, share - 0.02, COMMUNICATION) == 0
    assert pixels(figure, share + 0.02, COMMUNICATION) > 20
    said = hover(figure, share + 0.02, 0.2)
    assert "all-reduce of 512 MiB among 8 ranks in 1 node" in said
    assert "stream 7" in said
    assert "stream 0, kernels: idle" in hover(figure, share + 0.02, 0.8)
    assert "mm" in hover(figure, 0.1, 0.8)


def test_streams_by_keyboard(page: Page, tmp_path: Path) -> None:
    opened(page, job(tmp_path, trained(collective=True)))
    page.locator("#step").focus()
    said = page.locator("#said")
    page.keyboard.press("p")
    assert "all-reduce of 512 MiB" in said.inner_text()
    page.keyboard.press("ArrowUp")
    assert "stream 0, backward" in said.inner_text()
    page.keyboard.press("Shift+ArrowLeft")
    assert "stream 0, forward" in said.inner_text()
    page.keyboard.press("Shift+ArrowRight")
    assert "stream 0, backward" in said.inner_text()
    whole = shown(page.locator("#step"))
    page.keyboard.press("+")
    near = shown(page.locator("#step"))
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_a_planned_layout_beside_pytorchs(page: Page, tmp_path: Path) -> None:
    trace = training()
    plan = plan_of(trace, static_plan(trace, seconds=20))
    assert plan.allocation is not None
    save_plan(plan, tmp_path / "job.plan")
    opened(page, tmp_path / "job.plan")
    assert format_bytes(plan.allocation.arena_bytes) in page.locator("h1").inner_text()
    planned, blocks = box(page.locator("#planned-map")), box(page.locator("#blocks-map"))
    assert planned["y"] == blocks["y"] and planned["x"] < blocks["x"]
    said = [hover(page.locator("#planned-map"), 0.5, share / 20) for share in range(1, 20)]
    assert any("temporaries" in text for text in said)
