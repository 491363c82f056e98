"""The list of jobs for `memplan fit`, and what is made of their answers."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import fit
from bench.results import ROOT

JOB = fit.Job("small", "card", "4GiB", "train.py --batch-size 8")


def row(**more: Any) -> dict[str, Any]:
    return {
        "group": "card", **JOB.what(), "seconds": 60.0, "captures": 3, "fits": True, "exact": True,
        "levers": ["recompute"], "card_bytes": 4 << 30, "plain_high_bytes": 6 << 30,
        "peak_bytes": 3 << 30, "high_bytes": 4 << 30, "added_fraction": 0.1, "over_promise": 0.0,
    } | more  # fmt: skip


REAL = {"mlp": row(losses_different=0, promised_bytes=100, measured_bytes=90)}


def test_the_list_has_ten_jobs_of_each_group_and_their_scripts() -> None:
    jobs = fit.read_jobs()
    assert Counter(job.group for job in jobs.values()) == dict.fromkeys(fit.GROUPS, 10)
    for job in jobs.values():
        if job.place == ROOT:
            assert any((ROOT / word).is_file() for word in shlex.split(job.words)), job.name


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "jobs.toml"
    file.write_text('[card.a]\ngpu = "1GiB"\njob = "a.py"\n[many.a]\ngpu = "1GiB"\njob = "b.py"\n')
    with pytest.raises(ValueError, match="two jobs are called a"):
        fit.read_jobs(file)


def test_the_summary_counts_only_what_was_said() -> None:
    rows = {
        "a": row(),
        "b": row(exact=False, over_promise=0.01),
        "c": row(fits=False, exact=False, plain_high_bytes=1 << 30),
        "d": {"group": "many", "fits": False, "exact": False, "error": "no answer"},
    }
    del rows["c"]["over_promise"]
    found = fit.summary(rows, REAL)
    assert (found["jobs"], found["too_large"], found["fit"], found["exact"]) == (4, 2, 2, 1)
    assert (found["captured_again"], found["worst_over_promise"]) == (2, 0.01)
    assert (found["real_jobs"], found["real_losses_different"]) == (1, 0)


def test_a_real_run_above_its_promise_is_the_worst() -> None:
    real = {"mlp": REAL["mlp"] | {"measured_bytes": 150}}
    assert fit.summary({"a": row()}, real)["worst_over_promise"] == pytest.approx(0.5)


def test_nothing_that_was_captured_again_is_no_kept_promise() -> None:
    assert fit.summary({"a": row(error="none")}, {})["worst_over_promise"] > 0.02


def test_a_kept_answer_counts_for_the_same_job_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "KEPT", tmp_path)
    assert fit.kept(JOB, "tree") is None
    (tmp_path / "small.json").write_text(json.dumps(row(source="tree")))
    assert fit.kept(JOB, "tree") is not None
    assert fit.kept(JOB, "other tree") is None and fit.kept(JOB, "") is None
    assert fit.kept(JOB, None) is not None
    assert fit.kept(JOB._replace(gpu="8GiB"), None) is None


def test_the_table_has_a_line_for_each_job() -> None:
    text = fit.table({"a": row(), "b": row(group="many", fits=False, exact=False)})
    assert text.count("`train.py --batch-size 8`") == 2
    assert "6.0 GiB | 4.0 GiB | recompute | +10.0%" in text and "**does not fit**" in text


def test_an_answer_is_asked_with_exact_levers_first_and_held_to_its_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def memplan(words: Sequence[str], folder: Path) -> tuple[str, float]:
        asked.append(words[:4] if words[0] == "fit" else words[:1])
        sizes = {"peak_bytes": 100, "high_bytes": 110, "alloc_conf": ""}
        if words[0] == "estimate":
            return json.dumps(sizes | {"peak_bytes": 103}), 1.0
        exact = "exact" in words
        lever = {"kind": "recompute" if exact else "loss", "numbers": "rounding"}
        said = {
            "fits": not exact, "before": sizes, "after": sizes, "levers": [lever],
            "tried": ["this"], "attempts": [1], "gpu": {"total_bytes": 120},
            "added_fraction": 0.5, "plan": "job.plan",
        }  # fmt: skip
        return json.dumps(said), 2.0

    monkeypatch.setattr(fit, "memplan", memplan)
    found = fit.fit(JOB, tmp_path / "job.plan")
    assert [words[3] for words in asked[:2]] == ["exact", "rounding"] and len(asked) == 3
    assert (found["fits"], found["exact"], found["captures"]) == (True, False, 4)
    assert found["over_promise"] == pytest.approx(0.03)
    refused = {"high_bytes": 110, "levers": ["recompute"], "tried": ["this"]}
    assert found["refused"] == {"exact": refused}
