"""What a data loader that was read ahead gives in an epoch."""

from __future__ import annotations

import msgspec


class Batches(msgspec.Struct, kw_only=True):
    """What a data loader gives in an epoch, and which of it a capture was given.

    A unit is what runs on a batch: an optimizer step, or a turn of a loop that evaluates.
    """

    bytes: list[int] = []
    """Bytes of each batch of an epoch, in order; empty if not read ahead or all equal."""
    dims: list[list[int]] = []
    """For each tensor dimension that differs between batches, its value in each batch; empty where
    the batches have different tensors."""
    complete: bool = False
    """Whether that is the whole epoch."""
    drawn: bool = False
    """Whether each run of the job has another order: no seed fixes what is drawn."""
    each: int = 1
    """Batches that a unit takes."""
    begun: int = 0
    """The first unit."""
    before: list[int] = []
    """Numbers, in `bytes`, of the batches that came before the loader's own."""
    given_from: int = 0
    """The earliest unit that can have had another batch than the loader's own; see `first_unit`."""
    others: list[int] = []
    """Numbers of the batches that units were given behind the steady one: `units_each` units on
    each."""
    units_each: int = 1
    first_unit: int = 0
    """The earliest unit that can have had the first of them: a loop may fetch one ahead."""
    edges: list[int] = []
    """Events at which the units begin, and the last ends. Empty: they are the optimizer steps."""
