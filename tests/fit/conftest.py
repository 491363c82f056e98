"""What tests of fitting share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short(short_searches: None) -> None:
    """Of plans it matters here that they are made, captured and chosen."""
