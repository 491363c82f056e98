"""Answers as HTML for notebooks."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from memplan.estimation import estimate
from memplan.estimation.difference import difference
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile
from memplan.types.estimate import Estimate
from memplan.types.trace import EventKind, Trace, TraceMeta

MIB = 1 << 20
HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m"


class Reader(HTMLParser):
    """What a browser would see: the text, and every tag closed in its order."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(fragment)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


@pytest.fixture(scope="module")
def trace() -> Trace:
    builder = TraceBuilder()
    builder.module = builder.source = builder.intern(HOSTILE)
    kept, freed = (builder.new_storage(dtype=HOSTILE, shape=HOSTILE) for _ in range(2))
    builder.append(EventKind.ALLOC, kept, 300 * MIB)
    builder.append(EventKind.ALLOC, freed, 40 * MIB)
    builder.append(EventKind.FREE, freed)
    return builder.build(TraceMeta(command=[HOSTILE], notes=[HOSTILE]))


@pytest.fixture(scope="module")
def answer(trace: Trace) -> Estimate:
    return estimate(trace, find_profile("8GiB"))


def test_names_of_a_job_are_text(trace: Trace, answer: Estimate) -> None:
    changed = difference(answer, msgspec.structs.replace(answer, held=[]))
    for shown in (trace, answer, changed):
        read = Reader(shown._repr_html_())
        assert "script" not in read.tags
        assert "<script>alert(1)</script>" in read.text
        assert "\x1b" not in read.text


def test_an_estimate_shows_its_verdict_parts_and_curve(answer: Estimate) -> None:
    read = Reader(answer._repr_html_())
    assert read.text.startswith("peak ")
    assert "of 8.0 GiB: fits" in read.text
    assert "memory over time, up to 340 MiB reserved" in read.text
    assert "svg" in read.tags
    for name, size in answer.breakdown.items():
        assert (name.replace("_", " ") in read.text) == bool(size)


def test_no_colour_is_of_one_background_only(answer: Estimate) -> None:
    """Text and curve have the page's own colour; the edge alone has one of ours."""
    assert len(re.findall(r"#[0-9a-f]{6}\b", answer._repr_html_())) == 1


def test_answers_stay_what_they_were_as_json(answer: Estimate) -> None:
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Estimate) == answer
