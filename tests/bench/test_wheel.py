"""What `make wheel` finds out about a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

from bench.results import ROOT
from bench.wheel import left_out


def test_files_that_a_wheel_lacks_are_named(tmp_path: Path) -> None:
    wheel = tmp_path / "memplan.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (ROOT / "src" / "memplan").rglob("*"):
            if path.is_file() and path.name not in ("devices.toml", "py.typed"):
                archive.write(path, path.relative_to(ROOT / "src"))
    assert left_out(wheel) == ["memplan/py.typed", "memplan/types/devices.toml"]
