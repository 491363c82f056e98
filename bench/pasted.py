"""What commands print, where the README and the documentation show it.

A block between `<!-- OUTPUT: memplan … -->` and `<!-- END OF OUTPUT -->` is what that command
prints on stdout; with `OUTPUT, first N lines:` its beginning. `python -m bench.pasted` runs each
command once, all in one folder beside the examples, so that one reads what another wrote, and
writes the blocks anew.
"""

from __future__ import annotations

import atexit
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from bench.results import ROOT

PAGES = ("README.md", "docs/tutorial.md", "docs/fit.md", "docs/layout.md")
_BLOCK = re.compile(
    r"(<!-- OUTPUT(?:, first (?P<lines>\d+) lines)?: (?P<command>.+?) -->\n)"
    r"```\n(?P<shown>.*?)```\n(<!-- END OF OUTPUT -->)",
    re.DOTALL,
)
_SECONDS = 1800


def refreshed(page: str, printed: Callable[[str], str]) -> str:
    """A page with the output of each of its commands as `printed` has it."""

    def block(found: re.Match[str]) -> str:
        lines = printed(found["command"]).splitlines()
        if found["lines"] is not None and int(found["lines"]) < len(lines):
            lines = [*lines[: int(found["lines"])], "  …"]
        text = "".join(f"{line}\n" for line in lines)
        return f"{found[1]}```\n{text}```\n{found[5]}"

    return _BLOCK.sub(block, page)


def commands(page: str) -> list[str]:
    """Those whose output a page shows."""
    return [found["command"] for found in _BLOCK.finditer(page)]


@cache
def _folder() -> Path:
    """Of all commands of this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    Path(folder.name, "examples").symlink_to(ROOT / "examples")
    return Path(folder.name)


@cache
def printed(command: str) -> str:
    """What a command of memplan prints on stdout. Raises RuntimeError where it does not answer."""
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(
        words, cwd=_folder(), capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode not in (0, 3):  # 3: no, it does not fit
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> int:
    for name in PAGES:
        page = ROOT / name
        page.write_text(refreshed(page.read_text(encoding="utf-8"), printed), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
