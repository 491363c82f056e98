"""Files named on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.cli import main


@pytest.mark.parametrize("command", ["estimate", "export"])
def test_what_is_read_is_never_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    mine = tmp_path / "train.py"
    mine.write_text("print('mine')\n")
    words = ["--format", "memory_viz"] if command == "export" else []
    assert main([command, *words, "-f", "-o", str(mine), str(mine)]) == 2
    assert "is what this command reads" in capsys.readouterr().err
    assert mine.read_text() == "print('mine')\n"
