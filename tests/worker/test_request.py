"""A request is data: it travels, is checked, and has one key however it was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from memplan.capturing.options import CaptureOptions, RankPlace, ScriptTarget
from memplan.types.device import find_profile
from memplan.types.errors import FormatError
from memplan.types.plan import OpOutput, OrderPart, Plan, RecomputeGroup, RecomputePart
from memplan.worker.request import CaptureRequest, Question, read_request

REQUEST = CaptureRequest(
    program=ScriptTarget("script", "train.py", ("--lr", "0.1", "ü")),
    launcher_arguments=("--local_rank=1",),
    options=CaptureOptions(
        profile=find_profile("h100"),
        steps=3,
        routing="worst",
        packages=("apex",),
        place=RankPlace(1, 4, 2, 2),
        environment={"A": "1", "B": "2"},
    ),
    alloc_conf="max_split_size_mb:64",
    plan=Plan(
        recompute=RecomputePart(groups=[RecomputeGroup("blocks.0", [OpOutput("aten.mm", 3)])]),
        order=OrderPart(parameters=4, gradient_bytes=100),
    ),
)


def changed(**options: object) -> CaptureRequest:
    return msgspec.structs.replace(REQUEST, options=replace(REQUEST.options, **options))  # type: ignore[arg-type]


def test_it_arrives_as_it_was_sent() -> None:
    assert read_request(REQUEST.encoded()) == REQUEST
    assert REQUEST.target.argv == ("--local_rank=1", "--lr", "0.1", "ü")


def test_equal_requests_have_one_key() -> None:
    assert changed(environment={"B": "2", "A": "1"}).key() == REQUEST.key()


@pytest.mark.parametrize(
    "other",
    [
        lambda: changed(environment={"A": "1", "B": "3"}),
        lambda: changed(place=RankPlace(2, 4, 2, 2)),
        lambda: changed(profile=find_profile("l4")),
        lambda: msgspec.structs.replace(REQUEST, plan=None),
        lambda: msgspec.structs.replace(REQUEST, alloc_conf=""),
        lambda: Question(REQUEST, None).about(ScriptTarget("script", "train.py"), None).request,
    ],
)
def test_another_request_has_another_key(other: Callable[[], CaptureRequest]) -> None:
    assert other().key() != REQUEST.key()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        REQUEST.encoded().replace(b'"capture"', b'"train"'),
        REQUEST.encoded().replace(b'"alloc_conf"', b'"conf"'),
        REQUEST.encoded().replace(b'"steps":3', b'"steps":"3"'),
        REQUEST.encoded().replace(b'"worst"', b'"best"'),
    ],
)
def test_what_is_no_request_is_refused(said: bytes) -> None:
    assert said != REQUEST.encoded()
    with pytest.raises(FormatError, match="not a request for a capture"):
        read_request(said)
