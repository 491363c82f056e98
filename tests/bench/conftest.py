"""What tests of the GPU suites share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def results(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the test module's `SUITE` would have written to bench/results, last, by name."""
    found: dict[str, Any] = {}

    def write(name: str, data: dict[str, Any]) -> Path:
        found.setdefault(name, {}).clear()
        found[name].update(json.loads(json.dumps(data)))
        return Path(name)

    monkeypatch.setattr(request.module.SUITE, "write_result", write)
    return found
