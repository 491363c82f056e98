"""JSON Schemas of `--json` and of `memplan run --stats`, from the answers' types (docs/json.md)."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from memplan.cli.env import Environment
from memplan.cli.layout import LayoutAnswer
from memplan.cli.order import OrderAnswer
from memplan.cli.plan import PlanAnswer
from memplan.cli.recompute import RecomputeAnswer
from memplan.cli.simulate import ReplayHeader
from memplan.fit.answer import Fit
from memplan.fit.maximum import Maximum
from memplan.placement.answer import Placement
from memplan.simulate import ReplayReport
from memplan.sweep.answer import Sweep
from memplan.types.difference import Difference
from memplan.types.estimate import Estimate
from memplan.types.out_of_memory import OomExplanation
from memplan.types.run_outcome import RunOutcome
from memplan.types.verification import Verification

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Replayed(ReplayHeader, ReplayReport):
    """The answer of `memplan simulate`."""


ANSWERS: dict[str, type] = {
    "estimate": Estimate,
    "estimate-maximize": Maximum,
    "estimate-from-snapshot": OomExplanation,
    "fit": Fit,
    "sweep": Sweep,
    "verify": Verification,
    "recompute": RecomputeAnswer,
    "order": OrderAnswer,
    "layout": LayoutAnswer,
    "plan": PlanAnswer,
    "place": Placement,
    "simulate": Replayed,
    "diff": Difference,
    "run": RunOutcome,
    "env": Environment,
}
"""The command, and its option where that has an answer of its own."""


def schema_of(name: str) -> dict[str, Any]:
    """The schema of one of `ANSWERS`.

    Fields that have a default may be missing: answers of an earlier memplan of the same
    `schema_version` lack those that came later.
    """
    answer = ANSWERS[name]
    _, parts = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    for part in _classes(msgspec.inspect.type_info(answer)):
        fields = parts[part.__name__]["properties"]
        for key, text in _explained(part):
            fields[key]["description"] = text
    for found in parts.values():
        if "description" in found:  # how far it is indented differs between releases of Python
            found["description"] = inspect.cleandoc(found["description"])
    whole = parts.pop(answer.__name__) | {"title": f"memplan {name}"}
    return {"$schema": _DIALECT, **whole, "$defs": parts}


def _classes(answer: msgspec.inspect.Type) -> set[type]:
    """The classes of the objects in an answer."""
    found: set[type] = set()
    todo: list[Any] = [answer]
    while todo:
        match todo.pop():
            case msgspec.inspect.StructType(cls=cls, fields=fields) | (
                msgspec.inspect.TypedDictType(cls=cls, fields=fields)
            ) if cls not in found:
                found.add(cls)
                todo += [field.type for field in fields]
            case msgspec.inspect.UnionType(types=types):
                todo += types
            case msgspec.inspect.ListType(item_type=item):
                todo.append(item)
            case msgspec.inspect.DictType(value_type=value):
                todo.append(value)
    return found


def _explained(part: type) -> Iterator[tuple[str, str]]:
    """Fields, and the string that follows each in the source of its class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, after in pairwise(body.body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())
