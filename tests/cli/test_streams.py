"""Reports on stdout: its character set and its colours."""

from __future__ import annotations

import io
import sys

import pytest
from rich.text import Text

from memplan.cli.streams import write_lines


def test_an_ascii_stream_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    write_lines([Text("1.1 GiB (1.0–1.2) Größe ██ │⠀⣿⣀ ▲ peak")])
    assert raw.getvalue() == b"1.1 GiB (1.0-1.2) Gr??e ## | #- ^ peak\n"


def test_no_color_means_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> str:
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        write_lines([Text("fits", style="bold green")])
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;32m" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed()
