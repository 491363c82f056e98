"""A training that is captured to see whether capturing works on the installed PyTorch."""

from __future__ import annotations

import traceback
from collections import Counter

import torch
from torch import nn

from memplan.capturing.cuda.device import SelfTest, self_test
from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions
from memplan.capturing.patches.internals import refusal
from memplan.capturing.session import CaptureSession
from memplan.types.device import DEFAULT_PROFILE, find_profile
from memplan.types.errors import MemplanError
from memplan.types.trace import EventKind, Role, Trace

_WIDTH = 320
_WEIGHT = _WIDTH * _WIDTH * 4
_MOST_STEPS = 8


def trial() -> SelfTest:
    """Steps of a small training (forward, backward, update), captured as any script's are.

    What they asked for is held to what such a training asks for. Raises nothing.
    """
    fake = self_test()
    if not fake.ok:
        return fake
    try:
        return _judged(_captured())
    except MemplanError as error:
        return SelfTest(False, error.message)
    except Exception as error:
        if (of_pytorch := refusal(error)) is not None:
            return SelfTest(False, of_pytorch.message)
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        return SelfTest(False, f"{type(error).__name__}: {error} (at {place})")


def _captured() -> Trace:
    session = CaptureSession(CaptureOptions(profile=find_profile(DEFAULT_PROFILE)))
    try:
        with session:
            model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False), nn.ReLU()).cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(_MOST_STEPS):
                model(torch.randn(2, _WIDTH, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    except EnoughSeen:
        pass
    return session.trace()


def _judged(trace: Trace) -> SelfTest:
    steps = trace.meta.optimizer_steps
    made = Counter(
        Role(trace.storages.role[event.storage])
        for event in trace
        if event.kind == EventKind.ALLOC and event.bytes == _WEIGHT
    )
    expected = {Role.PARAMETER: 1, Role.GRADIENT: steps, Role.OPTIMIZER_STATE: 2}
    wrong = [
        f"{made[role]} of a weight's size for {role.name.lower().replace('_', ' ')}, not {number}"
        for role, number in expected.items()
        if made[role] != number
    ]
    if not 2 <= steps < _MOST_STEPS:
        wrong.append(f"it ended after {steps} steps")
    if wrong:
        return SelfTest(False, f"a training of one weight was captured with {'; '.join(wrong)}")
    return SelfTest(True, f"a training step was captured on torch {torch.__version__}")
