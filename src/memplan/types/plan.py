"""The `Plan`: an envelope of separately versioned parts, each optional.

A plan is advice. What a part says about a run that turns out different is ignored, which costs
memory or time, never a number.
"""

from __future__ import annotations

import msgspec

from memplan.types.allocation import AllocationPart


class OpOutput(msgspec.Struct, frozen=True, array_like=True):
    """A value of a forward pass: the `output`-th storage (from 0) of those that the `nth` op (from
    0) of that name allocated in the `call`-th call (from 0) of a root module in the pass."""

    op: str
    nth: int
    output: int = 0
    call: int = 0


class RecomputeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values that are dropped after forward and recomputed together, when backward first needs one
    of them. What their recomputation needs and is itself dropped, in another group, is recomputed
    on the way and dropped again."""

    name: str
    """For people, errors and traces: `transformer.h.3`."""
    drop: list[OpOutput]


class RecomputePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which values of every forward pass to drop and recompute. What no group names is kept as
    long as without a plan."""

    version: int = 1
    groups: list[RecomputeGroup]
    hold: list[OpOutput] = []
    """Values that autograd does not save and that are kept all the same, as inputs of groups; each
    until the last group that needs it has been recomputed."""
    budget_bytes: int = 0
    """What it was made for; 0 for the least peak."""
    peak_bytes: int = 0
    """Promised, as PyTorch's allocated peak."""
    added_seconds: float = 0.0
    """Expected per step."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan was made from."""

    script: str = ""
    command: list[str] = []
    torch_version: str = ""
    gpu: str = ""
    forward_ops: int = 0
    requests: str = ""
    """Hex digest of the requests of the steady step (`phases.request_signature`)."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The envelope. Files: `types/plan_file.py`."""

    schema_version: int = 1
    memplan_version: str = ""
    made_from: Fingerprint = Fingerprint()
    alloc_conf: str = ""
    """Allocator settings that it counts on, in the syntax of `PYTORCH_ALLOC_CONF`; in force unless
    the environment or the script sets its own."""
    recompute: RecomputePart | None = None
    allocation: AllocationPart | None = None
    """Made from a capture with the rest of the plan in effect: recomputation changes requests."""
