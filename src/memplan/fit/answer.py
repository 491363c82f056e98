"""The `Fit`: the answer to "make it fit", as data. `docs/fit.md` describes it for readers."""

from __future__ import annotations

from typing import Literal

import msgspec

from memplan.types.estimate import Estimate, GpuInfo

SCHEMA_VERSION = 1
Numbers = Literal["exact", "rounding", "numbers"]
NUMBERS: tuple[Numbers, ...] = ("exact", "rounding", "numbers")
"""What levers do to losses, gradients and weights: nothing, another order of sums, more."""
Bound = Literal["", "compute", "link", "host"]
"""What added time is spent on: operators, transfers between card and host, the host's own work."""


class Lever(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the plan does."""

    kind: Literal[
        "recompute",
        "order",
        "allocator",
        "loss",
        "batches",
        "state",
        "grad_views",
        "step",
        "low_bit",
        "frozen",
        "offload",
        "addresses",
    ]
    numbers: Numbers = "exact"
    name: str
    """Recompute: where the values are made, with modules whose paths differ in numbers only folded
    into one (`blocks.*.mlp`). Order: what comes earlier. Allocator: the settings, as in
    `PYTORCH_ALLOC_CONF`."""
    groups: int = 0
    values: int = 0
    """Order: the parameters that are updated in backward."""
    saved_bytes: int = 0
    """Recompute: of one pass, what is not kept from forward to backward. Order: of the estimate's
    high bound. Allocator, addresses: reserved bytes at the peak."""
    added_seconds: float = 0.0
    """Per step."""
    added_fraction: float = 0.0
    """Added time as a fraction of the step's time without a plan."""
    bound: Bound = "compute"


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan beside the one that was chosen, captured as that one was."""

    fits: bool
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    least_card_bytes: int
    """The least card, like this one but for its size, that it fits, within 0.4 %."""
    added_seconds: float
    added_fraction: float
    bound: Bound
    """What bounds the lever that adds most of the time."""
    levers: list[Lever]
    plan: str | None = None
    """Path of the plan, where it was written."""


class RankFit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank with its plan, and the ranks like it."""

    rank: int
    """The one that was captured."""
    ranks: list[int]
    """All that its plan is for."""
    fits: bool
    peak_bytes: int
    """The peak with the plan in effect, as are its bounds."""
    low_bytes: int
    high_bytes: int
    added_seconds: float
    added_fraction: float
    levers: list[Lever]


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """A card and what a step costs on it, in the currency of the prices."""

    gpu: str
    per_hour: float
    """The price of one GPU for an hour."""
    fits: bool
    plan: bool
    """Whether the plan is in effect; without it on the other cards."""
    step_seconds: float | None
    step_cost: float | None
    """None where the job does not fit or the step's time is not known."""
    paid_after_steps: int | None = None
    """For other cards: the number of steps after which the plan has saved the cost of finding it,
    which is `seconds` at the price of the card that was asked about. None where it saves
    nothing."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the job with which it fits, or one that was tried in vain."""

    kind: Literal[
        "batch_size",
        "sequence_length",
        "image_size",
        "sharding",
        "ranks",
        "sharded_optimizer",
        "optimizer_8bit",
        "optimizer_bf16",
    ]
    option: str
    """The script's option; empty where the change is none of it."""
    before: int
    """The option's value; ranks, 1 GPU for a sharded optimizer, bits of an optimizer's state."""
    after: int
    fits: bool
    peak_bytes: int
    """The process peak of this job on each GPU, with its interval."""
    low_bytes: int
    high_bytes: int
    recompute: bool
    """Whether the least-peak plan is in effect in that figure."""
    alloc_conf: str
    """Allocator settings that the figure counts on; empty for those in force anyway."""
    verified: str
    """How, in words."""
    command: list[str] = []
    """The script and its arguments after the change; empty where the script has to be rewritten."""
    launch: list[str] = []
    """The whole command, its launcher included, where that is what changes."""
    code: str = ""
    """What to write, where the script has to be rewritten."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was captured. Bytes of `budget` and `planned` are requested bytes of a step."""

    budget_bytes: int
    """0 for the least peak."""
    planned_bytes: int
    """The step's peak as the solver saw it."""
    requested_bytes: int
    """The run's peak as captured with the plan in effect."""
    peak_bytes: int
    high_bytes: int
    least_card_bytes: int
    """The least card that it fits, within 0.4 %."""
    alloc_conf: str
    """Allocator settings that these count on; empty for those in force anyway."""
    fits: bool
    added_fraction: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a job fits a card, and what makes it fit."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    torch_version: str
    gpu: GpuInfo
    fits: bool
    """Whether the job fits with the levers below, within `at_most`; without any if empty."""
    complete: bool = True
    """False where a signal ended the search: the best plan until then."""
    before: Estimate
    after: Estimate | None
    """The estimate with the plan in effect, from a new capture where it recomputes. If `fits` is
    false, that of the plan with the lowest peak. None where no plan was needed or possible."""
    least_card_bytes: int | None
    """Only if `fits` is false: the smallest card, like this one except for its memory, on which the
    job fits with a plan within `at_most`, to 0.4 %. None where not known."""
    step_seconds: float | None
    """Forward and backward of a step without a plan, by the card's data sheet; None where no plan
    was looked for."""
    added_seconds: float
    added_fraction: float
    levers: list[Lever]
    host_bytes: int = 0
    """Page-locked host memory that the levers use in each process."""
    at_most: float | None = None
    """The most that a plan may add, as a fraction, where that was asked for."""
    exact: Alternative | None = None
    """Where the levers change numbers: the cheapest plan that does not; if none fits, the one that
    needs the least memory."""
    least: Alternative | None = None
    """The captured plan that needs the least memory."""
    frontier: list[Alternative] = []
    """Plans from the least to the most added time, with falling peaks, if they were asked for."""
    ranks: list[RankFit] = []
    """Answers for all ranks, if they were asked for, those that need most memory first. The rest of
    this answer is about the rank that does not fit, or else about the one whose plan adds the most
    time."""
    priced: list[Priced] = []
    """Prices, if they were given: this card with the plan first, then other cards without one."""
    captures: int = 1
    """How often the script was captured."""
    levers_tried: list[str] = []
    """Kinds of levers that the least memory is the least of."""
    changes: list[Change]
    """Only if `fits` is false: the smallest changes of the job that fit, nearest first."""
    tried: list[str]
    """Only if `fits` is false: sentences about what did not help."""
    attempts: list[Attempt]
    """Every plan that was captured, in order."""
    plan: str | None
    """Path of the plan, where one was asked for and written."""
    seconds: float
    """Time that finding the answer took."""
    notes: list[str]

    def _repr_html_(self) -> str:
        from memplan.fit.text import fit_html

        return fit_html(self)


def link_seconds(answer: Fit) -> float:
    """What transfers over the link to the host add to a step, beside its captured operators."""
    return sum(lever.added_seconds for lever in answer.levers if lever.bound == "link")
