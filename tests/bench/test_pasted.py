"""What the documentation shows of a command is what the command prints."""

from __future__ import annotations

import re

import pytest
import torch

from bench.pasted import PAGES, commands, printed, refreshed
from bench.results import ROOT

_OF_THE_MACHINE = ("host RAM",)
"""What depends on the machine and on the moment."""


def test_a_block_is_written_anew() -> None:
    page = (
        "before\n<!-- OUTPUT, first 2 lines: memplan a -->\n```\nold\n```\n<!-- END OF OUTPUT -->\n"
        "```\nkept\n```\n<!-- OUTPUT: memplan b -->\n```\n```\n<!-- END OF OUTPUT -->\n"
    )
    assert commands(page) == ["memplan a", "memplan b"]
    answers = {"memplan a": "1\n2\n3\n", "memplan b": "4\n"}
    assert refreshed(page, answers.__getitem__) == page.replace("old\n", "1\n2\n  …\n").replace(
        "-->\n```\n```", "-->\n```\n4\n```"
    )


def test_every_page_shows_some_and_marks_end() -> None:
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        assert commands(page), name
        assert page.count("<!-- OUTPUT") == page.count("<!-- END OF OUTPUT -->")
        assert len(commands(page)) == page.count("<!-- OUTPUT")


def test_the_readme_shows_what_the_demo_prints() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==([\d.]+)", pins, re.MULTILINE)
    if pinned is None or not torch.__version__.startswith(pinned[1]):
        pytest.skip("shown of the release that is pinned")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    demo = commands(page)[0]
    assert _same(refreshed(page, lambda c: printed(c) if c == demo else "")) == _same(page)


def _same(page: str) -> list[str]:
    """The lines of the first block that are the same everywhere, without what a CPU took."""
    block = page.partition("<!-- OUTPUT")[2].partition("<!-- END OF OUTPUT")[0]
    block = re.sub(r"; input .*(hidden|exposed)", "", block)
    return [line for line in block.splitlines() if not line.startswith(_OF_THE_MACHINE)]
