"""What tests of captured steps share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Functions of other tests have the same code: their captures would count to the limit."""
    torch._dynamo.reset()
    # Scalar kernels are the same on every processor, and made in less time.
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield
    torch._dynamo.reset()
