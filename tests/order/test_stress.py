"""The native part against the definitions, built with sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sanitized import build_stress, run_stress

pytestmark = pytest.mark.stress


@pytest.mark.parametrize(
    ("sanitizers", "rounds"),
    [("address,undefined", 500), ("thread", 100)],
    ids=("memory", "threads"),
)
def test_cuts_narrowing_and_search_agree_with_the_definitions(
    tmp_path: Path, sanitizers: str, rounds: int
) -> None:
    program = build_stress("memplan_order_stress", sanitizers, tmp_path, optimize="-O0")
    assert run_stress(program, str(rounds)) == f"{rounds} rounds\n"
