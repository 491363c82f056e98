"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def memplan_test_data() -> Path:
    """The optional folder of real logs, problems and measured jobs; a test without it is skipped.

    `MEMPLAN_SHARED_DATA` names it; else it is looked for beside the checkout.
    """
    folder = Path(os.environ.get("MEMPLAN_SHARED_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: name the folder in MEMPLAN_SHARED_DATA")
    return folder
