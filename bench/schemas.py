"""The committed JSON Schemas of answers, `docs/schemas/*.json`, written anew: `make schemas`."""

from __future__ import annotations

import json

from bench.results import ROOT
from memplan.cli.schemas import ANSWERS, schema_of

FOLDER = ROOT / "docs" / "schemas"


def text(name: str) -> str:
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in ANSWERS:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
