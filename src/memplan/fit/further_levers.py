"""The levers that are tried on top of the best plan so far, in this order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memplan.fit.answer import Numbers
from memplan.fit.frozen import hides, with_frozen_on_host
from memplan.fit.host_state import is_quick, least_seconds, with_state_on_host
from memplan.fit.loss import with_loss_in_chunks, with_smaller_chunks
from memplan.fit.low_bit import with_low_bit_state
from memplan.fit.micro_batches import with_larger_batches, with_micro_batches
from memplan.fit.state import State


class FurtherLever(NamedTuple):
    """One that is tried on the best plan so far, and recomputation again on top of it."""

    kind: str
    words: str
    numbers: Numbers
    apply: Callable[[State], State]
    """The job as it is, maybe with a note, where it cannot have it."""
    beyond: float
    """Time that the best plan so far adds, as a fraction of the step, up to which it is left."""
    least: Callable[[State], float] = lambda state: 0.0
    """Seconds that it adds to a step whatever comes on top, as far as that is known before a
    capture: with as many it cannot beat a plan that adds fewer."""
    first: Callable[[State], bool] = lambda state: False
    """Whether it should add next to nothing, and is tried before recomputation."""
    instead_of: str = ""
    """A part of plans that it takes the place of."""
    otherwise: Callable[[State, State, bool], State | None] = lambda base, changed, fits: None
    """From the job without it, with it, and whether that came to fit: the job with more or less of
    it, to be tried, too."""


FURTHER_LEVERS = (
    FurtherLever(
        "frozen", "frozen weights on the host", "exact", with_frozen_on_host, 0.05, first=hides
    ),
    FurtherLever(
        "state",
        "optimizer state on the host",
        "exact",
        with_state_on_host,
        0.05,
        least_seconds,
        first=is_quick,
    ),
    FurtherLever(
        "loss",
        "the loss in chunks",
        "rounding",
        with_loss_in_chunks,
        0.01,
        otherwise=with_smaller_chunks,
    ),
    # It seldom adds less: an update's weights are read more often.
    FurtherLever(
        "batches",
        "smaller batches",
        "rounding",
        with_micro_batches,
        0.1,
        otherwise=with_larger_batches,
    ),
    FurtherLever(
        "low_bit",
        "optimizer state in 8 bits",
        "numbers",
        with_low_bit_state,
        0.01,
        instead_of="state",
    ),
)
