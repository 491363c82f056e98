"""The report of jobs of 10^4, 3*10^5 and 5*10^6 events, and of a large snapshot: how long it takes
to make, how large it is, and how long Chromium takes to its first paint (`report.json`).

`python -m bench.report --snapshot-mib 1024` sets the size of the snapshot; `--only NAME` measures
one of the cases and leaves the others' committed figures as they are.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from bench.results import known_result, write_result
from bench.trace_load import training_trace
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Trace, TraceMeta
from memplan.types.trace_file import save_trace

LENGTHS = {"events_1e4": 10_000, "events_3e5": 300_000, "events_5e6": 5_000_000}
LOADS = 3
MIB = 1 << 20
_MAKE = """
import resource, sys
from memplan.cli import main
code = main(["report", "-f", "-o", sys.argv[2], sys.argv[1]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def random_trace(events: int) -> Trace:
    """No two stretches are alike: the worst to pack."""
    builder = TraceBuilder()
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 8000, events) * 512
    live: list[int] = []
    while len(builder) < events:
        builder.module = builder.intern(f"Model.layers.{rng.integers(64)}")
        builder.source = builder.intern(f"model.py:{rng.integers(400)}")
        if len(live) < 400 or rng.random() < 0.5:
            live.append(builder.new_storage(dtype="float32", shape=f"8x{rng.integers(300)}"))
            builder.append(EventKind.ALLOC, live[-1], int(sizes[len(builder)]))
        else:
            builder.append(EventKind.FREE, live.pop(int(rng.integers(len(live)))))
    return builder.build(TraceMeta())


def write_snapshot(path: Path, nbytes: int) -> int:
    """A snapshot pickle of at least so many bytes, as `_dump_snapshot` lays it out: each entry has
    a list of frames of its own. Returns the number of its entries.

    Blocks have 2 MiB each and are taken from segments of 20 MiB, last released first.
    """
    rng = np.random.default_rng(1)
    block, segment, first = 2 * MIB, 20 * MIB, 0x7F0000000000
    entries: list[dict[str, Any]] = []
    live: list[int] = []
    free: list[int] = []
    segments: list[int] = []
    frames = [
        {"name": f"forward_{n % 50}", "filename": f"/home/user/job/model_{n % 90}.py", "line": n}
        for n in range(4000)
    ]
    # An entry takes about 180 bytes with 24 frames.
    while len(entries) < nbytes // 180:
        at = int(rng.integers(160)) * 25
        stack = [frames[(at + depth) % 4000] for depth in range(24)]
        if len(live) < 2000 and (not live or rng.random() < 0.5):
            if not free:
                segments.append(first + len(segments) * segment)
                free = [segments[-1] + at for at in range(0, segment, block)][::-1]
                entries.append(_entry("segment_alloc", segments[-1], segment, stack))
            live.append(free.pop())
            entries.append(_entry("alloc", live[-1], block, stack))
        else:
            address = live.pop(int(rng.integers(len(live))))
            free.append(address)
            for action in ("free_requested", "free_completed"):
                entries.append(_entry(action, address, block, stack))
    for number, entry in enumerate(entries):
        entry["time_us"] = number
    held = set(live)
    document = {
        "segments": [_segment(address, segment, block, held) for address in segments],
        "device_traces": [entries],
        "allocator_settings": {},
        "external_annotations": [],
    }
    with path.open("wb") as file:
        pickle.dump(document, file, 4)
    return len(entries)


def _entry(action: str, address: int, size: int, stack: list[Any]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": list(stack)}


def _segment(address: int, size: int, block: int, held: set[int]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for at in range(address, address + size, block):
        state = "active_allocated" if at in held else "inactive"
        if blocks and blocks[-1]["state"] == state == "inactive":
            blocks[-1]["size"] += block
            continue
        asked = block if at in held else 0
        blocks.append({"address": at, "size": block, "requested_size": asked, "state": state,
                       "frames": []})  # fmt: skip
    used = sum(one["size"] for one in blocks if one["state"] != "inactive")
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def measured(source: Path, page: Path) -> dict[str, Any]:
    """Making the page in a process of its own, and opening it."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _MAKE, source, page], capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - start
    return {
        "source_bytes": source.stat().st_size,
        "seconds": seconds,
        "peak_memory_bytes": int(done.stdout.split()[-1]),
        "page_bytes": page.stat().st_size,
        **opened(page),
    }


def opened(page: Path) -> dict[str, float]:
    """Median seconds from the navigation's start to the first paint, and to all of it."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    first, whole = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(LOADS):
            tab = browser.new_page(viewport={"width": 1400, "height": 1000})
            tab.goto(page.as_uri(), timeout=120_000)
            tab.locator("html[data-painted=all]").wait_for(state="attached", timeout=120_000)
            marks = "performance.getEntriesByName('painted').map((mark) => mark.startTime)"
            first.append(tab.evaluate(marks)[0] / 1000)
            whole.append(tab.evaluate(marks)[-1] / 1000)
            tab.close()
        version = browser.version
        browser.close()
    return {
        "first_paint_seconds": statistics.median(first),
        "all_painted_seconds": statistics.median(whole),
        "chromium": float(version.split(".")[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshot-mib", type=int, default=290)
    parser.add_argument("--only", choices=(*LENGTHS, "random_3e5", "snapshot"))
    args = parser.parse_args()
    wanted = [args.only] if args.only else [*LENGTHS, "random_3e5", "snapshot"]
    data = known_result("report") if args.only else {}
    with tempfile.TemporaryDirectory() as folder:
        source, page = Path(folder) / "source", Path(folder) / "report.html"
        for name in wanted:
            source.unlink(missing_ok=True)
            if name == "snapshot":
                count = write_snapshot(source, args.snapshot_mib * MIB)
            else:
                trace = (
                    random_trace(300_000) if name == "random_3e5" else training_trace(LENGTHS[name])
                )
                count = len(trace)
                save_trace(trace, source)
                del trace
            data[name] = {"events": count, **measured(source, page)}
            print(name, data[name], flush=True)
    write_result("report", data)


if __name__ == "__main__":
    main()
