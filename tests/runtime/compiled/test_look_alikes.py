"""A number that stays symbolic is Python's own number to all that a step may ask of it."""

from __future__ import annotations

import copy
import fractions
import json
import math
import numbers
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from memplan.runtime.compiled.kept_numbers import plain_numbers, put_back
from memplan.runtime.compiled.look_alikes import escaped, look_alike
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.scalars import Scalar


class Noting:
    """Stands for the recorder."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.start = self.graph.placeholder("number")
        self.how: list[str] = []

    def arithmetic(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
        return self.graph.call_function(function, arguments)

    def refuse(self, refusal: NotCapturable) -> None:
        raise refusal

    def escaped(self, scalar: Scalar, how: str) -> None:
        self.how.append(how)


def symbolic(value: Any, noting: Noting) -> Any:
    return look_alike(Scalar(noting, value, noting.start, measured=True))


NODES: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda v: (1 - v * 2.5) / 3 + v % 0.7 - v // 0.3,
    "power": lambda v: 2**v + v**2,
    "signs": lambda v: -v + abs(v) - +v,
    "round": lambda v: round(v, 2) + round(v),
    "floor": lambda v: math.floor(v) + math.ceil(v) + math.trunc(v),
    "sum": lambda v: sum([v, v]),
    "copy": lambda v: copy.deepcopy({"a": v})["a"] + copy.copy(v),
    "with a bool": lambda v: v + True,
}
ESCAPES: dict[str, Callable[[Any], Any]] = {
    "conversions": lambda v: (float(v), int(v), complex(v), bool(v)),
    "text": lambda v: (f"{v:.3f}", f"{v}", "%.2f %s" % (v, v), repr(v)),  # noqa: UP031
    "comparisons": lambda v: (v > 1, 0 < v < 1, v == v, (v != 3) is True, v in [1, 2]),
    "divmod": lambda v: divmod(v, 0.2),
    "math": lambda v: (math.exp(v), math.isnan(v), math.hypot(v, 1), math.fsum([v, v])),
    "numpy": lambda v: (np.float32(2) * v, v * np.float32(2), np.arange(3) * v, np.array([v, 1])),
    "numpy's functions": lambda v: (np.exp(v), np.mean([v, v]), np.array([v]).dtype),
    "extremes": lambda v: (max(v, 3), min(0, v), sorted([v, 0.1])),
    "pickle": lambda v: pickle.loads(pickle.dumps({"a": v})),
    "ratio": lambda v: (
        fractions.Fraction(v),
        v.as_integer_ratio(),
        v.real,
        statistics.mean([v, v]),
    ),
    "key": lambda v: {v: 1},
    "json": lambda v: json.dumps(escaped({"a": [v], v: (v, 2)})),
    "imaginary": lambda v: 1j * v,
}
EITHER: dict[str, Callable[[Any], Any]] = {
    "a complex power": lambda v: (-v) ** 0.5,
}
FREE: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda v: (
        isinstance(v, float), isinstance(v, int), isinstance(v, bool), isinstance(v, numbers.Real),
    ),
    "class": lambda v: (v.__class__, np.isscalar(v), callable(v)),
    "attributes": lambda v: [hasattr(v, name) for name in ("item", "shape", "__len__", "__iter__")],
    "others": lambda v: (v == None, v != "a", v is True),  # noqa: E711
    "its own kind": lambda v: type(v)(3.5),
}  # fmt: skip
ERRORS: dict[str, Callable[[Any], Any]] = {
    "zero": lambda v: v / 0,
    "None": lambda v: v + None,
    "order": lambda v: v < None,
    "call": lambda v: v(),
    "item": lambda v: v[0],
    "unknown": lambda v: v.foo,
    "list": lambda v: list(v),
}


@pytest.mark.parametrize("value", [1.4910968542099, -0.25, 3, math.inf])
@pytest.mark.parametrize("question", [*NODES, *ESCAPES, *EITHER, *FREE, *ERRORS])
def test_python_gets_the_same_answer(question: str, value: Any) -> None:
    ask = (NODES | ESCAPES | EITHER | FREE | ERRORS)[question]
    noting = Noting()
    try:
        wanted = ask(value)
    except Exception as error:
        with pytest.raises(type(error)):
            ask(symbolic(value, noting))
        return
    found = plain_numbers(ask(symbolic(value, noting)))
    assert repr(found) == repr(wanted)
    assert type(found) is type(wanted)
    if question in NODES or question in FREE:
        assert noting.how == []
    if question in ESCAPES:
        assert noting.how


def test_c_code_does_not_read_it_unseen() -> None:
    """It would of a subclass of float, and the graph would keep the number of one step."""
    noting = Noting()
    torch.full((2,), math.exp(symbolic(0.5, noting)))
    assert noting.how


def test_what_a_step_keeps_becomes_plain() -> None:
    noting = Noting()
    number = symbolic(0.5, noting)
    holder = type("Holder", (), {})()
    holder.attribute = number
    holder.nested = {"a": [1, (2, (number, 3))]}
    del number
    assert put_back(noting)
    assert type(holder.attribute) is float
    assert type(holder.nested["a"][1][1][0]) is float
    assert put_back(noting) is None
