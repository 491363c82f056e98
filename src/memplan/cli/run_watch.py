"""`memplan run --watch`: the job's memory beside the plan, in the terminal's last lines.

The lines are kept out of the terminal's scrolling region, as `apt` does for its progress bar. So
the script's own streams stay what they are: what it writes, by whatever way and from whichever
process, scrolls above.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memplan.report.text import format_bytes
from memplan.runtime import nvml
from memplan.runtime.planned.install import PlannedRun, job_devices

_LINES = 4
_LEAST_ROWS = 3 * _LINES
_SECONDS = 0.5
_BAR = 24


@dataclass(frozen=True)
class Memory:
    """Memory of the job's first device, in bytes; None where it is not known."""

    steps: int | None = None
    allocated: int | None = None
    allocated_peak: int | None = None
    reserved: int | None = None
    reserved_peak: int | None = None
    arena: int | None = None
    """Bytes of the arena of the plan in effect."""
    card_used: int | None = None
    """Bytes that all processes use, as NVML counts them."""
    card_total: int | None = None


def memory_of(running: PlannedRun) -> Memory:
    """What the allocator counts that serves the job, be it PyTorch's own, and NVML."""
    card: dict[str, Any] = {"card_used": nvml.used_bytes(), "card_total": nvml.total_bytes()}
    job = running.job
    if job is None:
        if not torch.cuda.is_initialized():
            return Memory(**card)
        device = job_devices()[0]
        return Memory(
            allocated=torch.cuda.memory_allocated(device),
            allocated_peak=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            reserved_peak=torch.cuda.max_memory_reserved(device),
            **card,
        )
    device = job.devices[0]
    plans = [switch for switch in job.account.switches if switch.device == device]
    arena = plans[-1].arena_bytes if plans else None
    found = job.peaks.statistics(device)
    if found is None:
        return Memory(steps=job.account.steps, arena=arena, **card)
    return Memory(
        steps=job.account.steps,
        allocated=found.allocated,
        allocated_peak=found.allocated_peak,
        reserved=found.reserved,
        reserved_peak=found.reserved_peak,
        arena=arena,
        **card,
    )


def lines_of(memory: Memory, console: Console) -> list[str]:
    """`_LINES` lines with the console's colours, none wider than it is."""
    sizes = (memory.reserved_peak, memory.arena, memory.card_total)
    most = max((size for size in sizes if size is not None), default=0)
    table = Table.grid(padding=(0, 1))
    step = "" if memory.steps is None else f"step {memory.steps}"
    table.add_row(Text("memplan", "bold"), Text(step), Text(_said(memory), "dim"))
    for name, now, peak in (
        ("allocated", memory.allocated, memory.allocated_peak),
        ("reserved", memory.reserved, memory.reserved_peak),
    ):
        beside = f"{_size(now)}, peak {_size(peak)}"
        if name == "reserved" and memory.arena is not None:
            beside += f", planned {_size(memory.arena)}"
        table.add_row(name, _bar(now, most), beside)
    of = f"{_size(memory.card_used)} of {_size(memory.card_total)}, all processes"
    table.add_row("card", _bar(memory.card_used, most), of)
    with console.capture() as captured:
        console.print(table, no_wrap=True, overflow="crop")
    return captured.get().splitlines()[:_LINES]


def _said(memory: Memory) -> str:
    if memory.reserved is None:
        return "no GPU memory in use"
    return "no plan in effect" if memory.arena is None else "a plan is in effect"


def _size(nbytes: int | None) -> str:
    return "–" if nbytes is None else format_bytes(nbytes)


def _bar(now: int | None, most: int) -> Bar:
    return Bar(max(most, 1), 0, now or 0, width=_BAR, color="green")


class Watch:
    """Shows `read()` in the last lines of the terminal `descriptor` until it is closed; a context
    manager. `say` is told why where there is nothing to show."""

    def __init__(
        self, read: Callable[[], Memory], descriptor: int, say: Callable[[str], None]
    ) -> None:
        self._read = read
        self._terminal = descriptor
        self._say = say
        self._rows = 0
        self._process = os.getpid()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._draw_on, name="memplan-watch", daemon=True)

    def __enter__(self) -> Watch:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return self  # one of a terminal's processes shows itself
        if not os.isatty(self._terminal):
            self._say("--watch: stderr is no terminal, so nothing is shown")
        elif os.get_terminal_size(self._terminal).lines < _LEAST_ROWS:
            self._say(f"--watch: the terminal has fewer than {_LEAST_ROWS} lines")
        else:
            self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """The terminal as it was. Nothing happens in a child that the script forked."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        self._end.set()
        self._thread.join()

    def _draw_on(self) -> None:
        try:
            while True:
                self._draw()
                if self._end.wait(_SECONDS):
                    break
            self._draw()
        except Exception as error:  # the script goes on, whatever is wrong here
            self._say(f"--watch ends: {type(error).__name__}: {error}")
        with suppress(OSError):
            self._write("\x1b7\x1b[r\x1b8")  # scroll the whole terminal again
            below = self._rows - _LINES + 1
            self._write(f"\x1b7\x1b[{below};1H\x1b[J\x1b8" if self._rows else "")

    def _draw(self) -> None:
        columns, rows = os.get_terminal_size(self._terminal)
        if rows < _LEAST_ROWS:
            return
        text = ""
        if rows != self._rows:  # at first, and where the window was made larger or smaller
            self._rows, above = rows, rows - _LINES
            text = "\n" * _LINES + f"\x1b[{_LINES}A\x1b7\x1b[1;{above}r\x1b8"
        console = Console(width=columns - 1, force_terminal=True, legacy_windows=False)
        text += "\x1b7"
        for number, line in enumerate(lines_of(self._read(), console), start=rows - _LINES + 1):
            text += f"\x1b[{number};1H\x1b[2K{line}"
        self._write(text + "\x1b8")

    def _write(self, text: str) -> None:
        os.write(self._terminal, text.encode("utf-8"))
