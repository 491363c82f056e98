"""What tests of processes that capture share."""

from __future__ import annotations

import subprocess

import pytest

from memplan.worker import process


@pytest.fixture(autouse=True)
def processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have them: everywhere else they are forked (`tests/warm.py`)."""
    monkeypatch.setattr(process, "subprocess", subprocess)
