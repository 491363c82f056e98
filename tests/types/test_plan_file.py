"""Plan files: what is written is read; anything else is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.types import plan_file
from memplan.types.errors import FormatError, UsageError
from memplan.types.plan import (
    Fingerprint,
    OpOutput,
    OrderPart,
    Plan,
    RecomputeGroup,
    RecomputePart,
)
from memplan.types.plan_file import load_plan, save_plan

PLAN = Plan(
    memplan_version="0.1.0",
    made_from=Fingerprint(script="train.py", command=["train.py", "--lr", "1"], gpu="rtx4090"),
    recompute=RecomputePart(
        groups=[RecomputeGroup("h.0", [OpOutput("aten.mm.default", 3), OpOutput("a", 0, 1, 2)])],
        hold=[OpOutput("aten.add.Tensor", 1)],
        budget_bytes=1 << 30,
        peak_bytes=1 << 29,
        added_seconds=0.25,
    ),
    order=OrderPart(parameters=2, gradient_bytes=1 << 20, peak_bytes=1 << 29),
)


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "job.plan"
    save_plan(PLAN, path)
    assert load_plan(path) == PLAN
    with pytest.raises(UsageError, match="exists"):
        save_plan(Plan(memplan_version="9"), path)
    assert load_plan(path) == PLAN
    save_plan(Plan(memplan_version="9"), path, overwrite=True)
    assert load_plan(path).recompute is None


GOOD_PART = '{"groups": [{"name": "g", "drop": [["aten.mm.default", 0]]}]}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a plan"),
        ("{}", "does not say which memplan"),
        ("[1]", "not a plan"),
        ("\x80\x04", "not a plan"),
        ('{"memplan_version": "1", "recompute": ' + "[" * 100_000, "not a plan"),
        ('{"memplan_version": "1", "schema_version": 99}', "version 99"),
        ('{"memplan_version": "1", "surprise": 1}', "surprise"),
        ('{"memplan_version": "1", "recompute": {"version": 7, "groups": []}}', "version 7"),
        (
            '{"memplan_version": "1", "recompute": {"groups": [{"name": "g", "drop": '
            '[["aten.mm.default", -1]]}]}}',
            ">= 0",
        ),
        (
            '{"memplan_version": "1", "recompute": {"groups": [], "hold": [["a", 0, -2]]}}',
            ">= 0",
        ),
        (
            '{"memplan_version": "1", "recompute": {"groups": [{"name": "g", "drop": [[3, 4]]}]}}',
            "not a plan",
        ),
        ('{"memplan_version": "1", "recompute": ' + GOOD_PART[:-4], "not a plan"),
        (
            '{"memplan_version": "1", "order": {"version": 2, "parameters": 1, '
            '"gradient_bytes": 1}}',
            "order part has version 2",
        ),
        ('{"memplan_version": "1", "order": {"parameters": -1, "gradient_bytes": 1}}', ">= 0"),
        ('{"memplan_version": "1", "order": {"parameters": 1}}', "gradient_bytes"),
        ('{"memplan_version": "1", "state": {"share": 1.5}}', "<= 1"),
        ('{"memplan_version": "1", "state": {"version": 2, "share": 0.5}}', "state part has"),
        (
            '{"memplan_version": "1", "order": {"parameters": 1, "gradient_bytes": 1, "up": 1}}',
            "unknown field",
        ),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "job.plan"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=says):
        load_plan(path)


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.plan"
    save_plan(PLAN, path)
    monkeypatch.setattr(plan_file, "MAX_BYTES", 100)
    with pytest.raises(FormatError, match="more than"):
        load_plan(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_plan(tmp_path / "none.plan")
