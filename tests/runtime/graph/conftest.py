"""What tests of captured steps share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.guards

guards: Any = torch._dynamo.guards
# Of each compilation PyTorch logs how long its guards take, and empties the processor's caches to
# measure that: 22 ms, a tenth of a small compilation.
guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True, scope="module")
def no_fakes() -> None:
    """While fake tensors of other files' captures exist, torch.Tensor is changed: a collection in
    the middle of a test would change it back, which a capture counts as a change of code."""
    gc.collect()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Functions of other tests have the same code: their captures would count to the limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
