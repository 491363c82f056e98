"""What tests of captured steps share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Functions of other tests have the same code: their captures would count to the limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
