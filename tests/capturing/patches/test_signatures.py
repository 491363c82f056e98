"""What stands in a function's place takes what the function takes, by position and by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memplan.capturing import session
from memplan.capturing.options import CaptureOptions
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError
from tests.capturing.jobs import record

OPTIONS = CaptureOptions(profile=find_profile("h100"))
WITHOUT_A_DRIVER = {"Graph"}
"""Of `torch.accelerator`: says itself that it is not supported."""


def calls(signature: inspect.Signature) -> Iterator[tuple[list[int], dict[str, int]]]:
    """Ways to call a function: the arguments by position, then by name from each one on."""
    parameters = list(signature.parameters.values())
    only_by_name = {p.name: 0 for p in parameters if p.kind is p.KEYWORD_ONLY}
    needed = {p.name: 0 for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    listed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in listed)
    for count in range(least, len(listed) + 1):
        yield [0] * count, needed
        yield [0] * count, only_by_name
    for first, parameter in enumerate(listed):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self":
            yield [0] * first, {**{p.name: 0 for p in listed[first:]}, **needed}
    for parameter in listed[least:]:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            yield [0] * least, {parameter.name: 0, **needed}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        yield [0] * len(listed), {"another": 0, **needed}
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        yield [0] * (len(listed) + 2), needed


def signature_of(function: Any, *, own: bool = False) -> inspect.Signature | None:
    """`own`: not that of a function that it says it wraps."""
    if isinstance(function, staticmethod | classmethod):
        function = function.__func__
    if not callable(function):
        return None
    try:
        return inspect.signature(function, follow_wrapped=not own)
    except (ValueError, TypeError):  # written in C
        return None


def refused(real: inspect.Signature, ours: inspect.Signature) -> Iterator[str]:
    for args, kwargs in calls(real):
        try:
            ours.bind(*args, **kwargs)
        except TypeError as error:
            yield f"{error} ({len(args)} by position, {', '.join(kwargs)})"


def test_every_replaced_function_takes_the_arguments_of_the_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Patches] = []

    def patches() -> Patches:
        made.append(Patches())
        return made[-1]

    monkeypatch.setattr(session, "Patches", patches)
    wrong, compared = {}, 0
    with CaptureSession(OPTIONS):
        for owner, name, original in made[0].originals():
            real, ours = signature_of(original), signature_of(vars(owner)[name], own=True)
            if real is not None and ours is not None:
                compared += 1
                found = next(refused(real, ours), None)
                if found:
                    wrong[f"{owner.__name__}.{name}{real}"] = found
    assert compared > 100
    assert wrong == {}


@pytest.mark.parametrize("part", ["cuda", "cuda.memory", "cuda.random", "accelerator"])
def test_every_public_question_is_answered(part: str) -> None:
    """Functions that need no argument, called as a script on the card could."""
    module: Any = torch
    for name in part.split("."):
        module = getattr(module, name)
    unanswered = {}

    def job() -> None:
        for name in sorted(set(dir(module)) - WITHOUT_A_DRIVER):
            function = getattr(module, name)
            signature = None if isinstance(function, type) else signature_of(function)
            if name.startswith("_") or signature is None:
                continue
            if not str(getattr(function, "__module__", "")).startswith(("torch.", "memplan.")):
                continue
            try:
                signature.bind()
            except TypeError:
                continue
            try:
                function()
            except CaptureError:
                pass  # says what and why
            except Exception as error:
                unanswered[name] = repr(error)

    record(job, steps=0)
    assert unanswered == {}


def test_streams_by_name() -> None:
    def job() -> None:
        device = torch.device("cuda")
        assert torch.cuda.current_stream(device=device) == torch.cuda.default_stream(device="cuda")
        torch.cuda.synchronize(device=0)
        side = torch.cuda.Stream(device=device)
        assert torch.cuda.ExternalStream(side.cuda_stream, device=device) == side
        assert isinstance(torch.cuda.get_stream_from_external(5), torch.cuda.Stream)

    record(job, steps=0)
