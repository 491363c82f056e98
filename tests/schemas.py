"""Answers of `--json`, held to the committed schemas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"


@cache
def strict(name: str) -> Draft202012Validator:
    """Of the schema of an answer, that also refuses a field which it does not name, or that is
    missing."""
    schema = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    for part in (schema, *schema["$defs"].values()):
        if "properties" in part:
            part |= {"additionalProperties": False, "required": list(part["properties"])}
    return Draft202012Validator(schema)


def read_answer(name: str, text: str | bytes) -> Any:
    """What a command wrote. Raises jsonschema.ValidationError where it is not of the schema."""
    answer = json.loads(text)
    strict(name).validate(answer)
    return answer
