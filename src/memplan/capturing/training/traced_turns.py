"""The one function of a capture that PyTorch's compiler traces, because it is called in the job's
own loops (`plain_loops`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def turns(make: Callable[..., Iterable[Any]], items: Iterable[Any] | None) -> Iterable[Any] | None:
    """The items of a `for` loop, made so that they can be ended; None for a `while` loop. A graph
    of the compiler has none of this."""
    if torch.compiler.is_compiling():
        return items
    return make() if items is None else make(items)
