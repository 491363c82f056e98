"""The committed schemas. That answers keep to them, the tests of the commands say."""

from __future__ import annotations

import pytest
from jsonschema import ValidationError

from bench.schemas import text
from memplan.cli.schemas import ANSWERS, schema_of
from tests.schemas import FOLDER, read_answer

LAYOUT = (
    '{"schema_version": 1, "memplan_version": "0", "status": "solved", "buffers": 1, '
    '"height_bytes": 8, "lower_bound_bytes": 8, "max_load_bytes": 8, "optimal": true, '
    '"capacity_bytes": null, "cannot_fit": [], "seconds": 0.1}'
)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_committed_schema_is_that_of_the_type(name: str) -> None:
    committed = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert committed == text(name), "make schemas writes it anew"


def test_there_are_no_others() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == ANSWERS.keys()


def test_fields_are_explained() -> None:
    fields = schema_of("fit")["$defs"]["Estimate"]["properties"]
    assert fields["high_bytes"] == {"type": "integer"}
    assert "None without a card" in fields["fits"]["description"]
    assert (
        "outside PyTorch's allocator"
        in (schema_of("estimate")["$defs"]["Breakdown"]["properties"]["context"]["description"])
    )


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('"height_bytes": 8', '"height_bytes": "8"'),
        ('"solved"', '"done"'),
        ('"buffers": 1', '"buffer": 1'),
        ('"optimal": true, ', ""),
    ],
)
def test_another_answer_is_refused(right: str, wrong: str) -> None:
    assert read_answer("layout", LAYOUT)["buffers"] == 1
    with pytest.raises(ValidationError):
        read_answer("layout", LAYOUT.replace(right, wrong))
