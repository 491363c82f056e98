"""Megatron-LM's cases as commands, and some of them estimated."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.megatron import cases, environment, runner, table

GOLDENS = {golden.name: golden for golden in cases.goldens()}
ESTIMATED = ("gpt/gpt3_mcore_te_tp1_pp4_vp1@h100",)
pytestmark = pytest.mark.skipif(not GOLDENS, reason="the measured data are not here")


def test_every_case_is_a_command_or_says_why_not() -> None:
    apart = {golden.name: cases.counted_apart(golden) for golden in GOLDENS.values()}
    assert sum(not reason for reason in apart.values()) > 130
    for golden in GOLDENS.values():
        if apart[golden.name].startswith("its script"):
            continue
        words = cases.command(golden.case, Path("/source"), Path("/work"))
        assert words[:3] == ["torchrun", "--nproc-per-node", "8"]
        assert (cases.SOURCE / Path(words[3]).relative_to("/source")).is_file()
        assert not any("${" in word for word in words)
        assert words[-2] == "--vocab-size"
        assert "--data-path" not in words


def test_an_answer_is_held_against_the_measured_peak() -> None:
    golden = cases.Golden("a/b", "h100", 1000, 800)
    sizes = {"peak_bytes": 5, "low_bytes": 4, "high_bytes": 6}
    allocated = {"allocated_peak_bytes": 1004, "allocated_low_bytes": 1001}
    found = runner.compared(golden, {**sizes, **allocated, "allocated_high_bytes": 1010})
    assert (found["error"], found["near"], found["inside"]) == (0.004, True, False)
    assert found["error_after_step_2"] == 0.255


def test_cases_apart_do_not_count() -> None:
    answered = {"apart": "", "answered": True, "error": -0.01, "near": False, "inside": True}
    answered["host_bytes"] = 7
    failed = {"apart": "", "answered": False, "complaint": "no"}
    sums = table.summary({"a": answered, "b": failed, "c": {**failed, "apart": "fp8"}}, 9)
    assert (sums["run"], sums["answered"], sums["apart"], sums["near"]) == (2, 1, 1, 0)
    assert (sums["answered_fraction"], sums["largest_error"]) == (0.5, 0.01)


@pytest.mark.skipif(not (environment.BUILD / "site.pins").exists(), reason="not prepared")
@pytest.mark.parametrize("name", ESTIMATED)
def test_a_case_is_near(name: str) -> None:
    result = runner.run(GOLDENS[name], environment.prepare())
    assert result["answered"], result
    assert result["near"], result
    assert result["inside"], result
