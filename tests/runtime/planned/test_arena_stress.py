"""The arena's bookkeeping under random jobs, with sanitizers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sanitized import build_stress, run_stress

pytestmark = pytest.mark.stress

OPERATIONS = 100_000


def test_no_byte_is_given_out_twice_whatever_plan_and_job_do(tmp_path: Path) -> None:
    program = build_stress("memplan_arena_stress", "address,undefined", tmp_path, optimize="-O0")
    printed = run_stress(program, str(OPERATIONS), "1")
    served = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", printed)}
    assert min(served[what] for what in ("hits", "dynamic", "adopted", "resyncs")) > 400
    assert served["damaged"] > 20
