"""One job in the pages of memray, of PyTorch's memory_viz and of memplan: how large they are, how
long Chromium takes to open them, and what they ask the network for (`report_peers.json`).

    python -m bench.report_peers

memray is installed from PyPI into a virtual environment that is deleted afterwards. It measures the
host's memory of the job on the CPU, in which the job runs for real; memplan captures the same job
for a card, and memory_viz shows what memplan exports. memory_viz's viewer comes from a CDN: without
network its page stays empty, and only its size is measured.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

from bench.results import ROOT, write_result

LOADS = 5
JOB = [
    *("examples/gpt2/train.py", "--precision", "fp32", "--batch-size", "1", "--context", "128"),
    *("--layers", "4", "--steps", "3", "--workers", "0"),
]
MEMRAY = {
    "memray_flamegraph": ["flamegraph", "--no-web"],
    "memray_temporal": ["flamegraph", "--temporal", "--no-web"],
    "memray_table": ["table", "--no-web"],
}
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
_LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def run(*command: str | Path) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def memray_in(folder: Path) -> Path:
    """A Python that has memray beside the packages of this one."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "memray")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "beside.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python


def pages(folder: Path) -> dict[str, dict[str, Any]]:
    """Make all pages in `folder`, each under its name."""
    on_cpu = [*JOB, "--device", "cpu"]
    recorded, trace, snapshot = folder / "job.bin", folder / "job.trace", folder / "job.pickle"
    memray = memray_in(folder / "venv")
    found: dict[str, dict[str, Any]] = {
        "job": {
            "seconds": run(sys.executable, *on_cpu),
            "memray_seconds": run(memray, "-m", "memray", "run", "-q", "-o", recorded, *on_cpu),
            "capture_seconds": run(
                *(sys.executable, "-m", "memplan", "estimate"),
                "--gpu",
                "a100-80gb",
                "-o",
                trace,
                *JOB,
            ),
        }
    }
    for name, words in MEMRAY.items():
        page = folder / f"{name}.html"
        found[name] = {"seconds": run(memray, "-m", "memray", *words, "-o", page, recorded)}
    page = folder / "memplan.html"
    found["memplan"] = {
        "seconds": run(sys.executable, "-m", "memplan", "report", "-o", page, trace)
    }
    export: list[str | Path] = ["export", "--format", "memory_viz", "-o", snapshot, trace]
    plot: list[str | Path] = ["trace_plot", snapshot, "-o", folder / "memory_viz.html"]
    seconds = run(sys.executable, "-m", "memplan", *export)
    seconds += run(sys.executable, "-m", "torch.cuda._memory_viz", *plot)
    found["memory_viz"] = {"seconds": seconds}
    return found


def opened(tab: Page, page: Path) -> dict[str, Any]:
    """Seconds from the navigation's start, and what else than its file the page asks for."""
    paint, loaded = [], []
    asked: set[str] = set()
    tab.on("request", lambda request: asked.add(request.url))
    for _ in range(LOADS):
        tab.goto(page.as_uri(), timeout=120_000)
        tab.wait_for_timeout(500)
        paint.append(tab.evaluate(_PAINT))
        loaded.append(tab.evaluate(_LOADED) / 1000)
    painted = [one / 1000 for one in paint if one is not None]
    return {
        "page_bytes": page.stat().st_size,
        "first_paint_seconds": statistics.median(painted) if painted else None,
        "loaded_seconds": statistics.median(loaded),
        "asks_for": sorted(url for url in asked if not url.startswith(("file:", "data:", "blob:"))),
    }


def main() -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        data = pages(Path(folder))
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in (*MEMRAY, "memory_viz", "memplan"):
            tab = browser.new_page(viewport={"width": 1400, "height": 1000})
            data[name] |= opened(tab, Path(folder) / f"{name}.html")
            tab.close()
            print(name, data[name], flush=True)
        browser.close()
    write_result("report_peers", data)


if __name__ == "__main__":
    main()
