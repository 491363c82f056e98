"""The allocator's library under torture, built with sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sanitized import build_stress, run_stress

pytestmark = pytest.mark.stress

SANITIZERS = {"thread": 40_000, "address,undefined": 60_000}
"""And how many random requests and releases."""


@pytest.fixture(scope="module", params=SANITIZERS, ids=("threads", "memory"))
def torture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    """The program, and how much of it."""
    folder = tmp_path_factory.mktemp("torture")
    program = build_stress("memplan_torture", request.param, folder)
    return program, SANITIZERS[request.param]


def test_no_byte_has_two_owners_and_all_memory_comes_back(torture: tuple[Path, int]) -> None:
    program, operations = torture
    text = run_stress(program, str(operations), "1", "4")
    assert "4 threads" in text and " 0 errors" in text


def test_every_call_to_the_driver_may_fail(torture: tuple[Path, int]) -> None:
    program, _ = torture
    assert " 0 errors" in run_stress(program, "faults")
