"""Accelerate's own test scripts."""

from __future__ import annotations

from bench.scripts.case import Case, Setup

SETUP = Setup("accelerate", wheels=("accelerate==1.15.0",))

CASES = (
    Case(
        name="accelerate-test-script",
        setup=SETUP,
        package="accelerate==1.15.0",
        argv=("-m", "accelerate.test_utils.scripts.test_script"),
    ),
)
