"""The commands that the documentation shows."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "examples" / "README.md",
]
_FENCE = re.compile(
    r"^```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)
_INLINE = re.compile(r"(?<!`)`(memplan [^`]+)`")
_OF_A_SHELL = ("", "console", "sh", "bash")
_SHOWN_OF_FILES = re.compile(r"<!-- OUTPUT[^>]*: (.+?) -->")


@dataclass(frozen=True)
class Documented:
    """A command, as it is typed, and the page that shows it first."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """Of memplan: what stands behind its name, up to what the shell takes for itself."""
        words = shlex.split(self.text, comments=True)
        words = words[words.index("memplan") + 1 :]
        ends = [words.index(mark) for mark in (">", "||", "&&", "|") if mark in words]
        return words[: min(ends, default=len(words))]

    @property
    def written(self) -> str:
        """The file that the shell writes; empty where none is."""
        words = shlex.split(self.text, comments=True)
        return words[words.index(">") + 1] if ">" in words else ""

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(*languages: str) -> list[tuple[Path, str]]:
    """(page, text) of each fenced block in one of these languages."""
    return [
        (page, found["text"])
        for page in PAGES
        for found in _FENCE.finditer(page.read_text(encoding="utf-8"))
        if found["language"] in languages
    ]


def commands() -> list[Documented]:
    """Each command line of memplan in the blocks, once, and those whose output is shown."""
    lines: dict[str, Documented] = {}
    for page, text in blocks(*_OF_A_SHELL):
        for line in text.replace("\\\n", " ").splitlines():
            typed = line.strip().removeprefix("$ ")
            if re.match(r"(memplan|torchrun .*-m memplan) ", typed):
                lines.setdefault(typed, Documented(_name(page), typed))
    for page in PAGES:
        for typed in _SHOWN_OF_FILES.findall(page.read_text(encoding="utf-8")):
            if typed.startswith("memplan "):
                lines.setdefault(typed, Documented(_name(page), typed))
    return list(lines.values())


def mentioned() -> list[Documented]:
    """Commands in the middle of a sentence, which may leave something out."""
    found: dict[str, Documented] = {}
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for typed in _INLINE.findall(text):
            plain = " ".join(typed.replace("\\|", "|").split())
            found.setdefault(plain, Documented(_name(page), plain))
    return list(found.values())


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))
