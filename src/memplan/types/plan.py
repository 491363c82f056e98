"""The `Plan`: an envelope of separately versioned parts, each optional.

A plan is advice. What a part says about a run that turns out different is ignored, which costs
memory or time, never a number.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class OpOutput(msgspec.Struct, frozen=True, array_like=True):
    """A value of a forward pass: the `output`-th storage (from 0) of those that the `nth` op (from
    0) of that name allocated in the `call`-th call (from 0) of a root module in the pass."""

    op: str
    nth: Count
    output: Count = 0
    call: Count = 0


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every lever's part has."""

    version: int = 1
    peak_bytes: Count = 0
    """Promised, as PyTorch's allocated peak, with the rest of the plan in effect."""


class Lever(Part, frozen=True, kw_only=True):
    """The part of one that takes time."""

    added_seconds: Seconds = 0.0
    """Expected per step."""


class RecomputeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values that are dropped after forward and recomputed together, when backward first needs one
    of them. What their recomputation needs and is itself dropped, in another group, is recomputed
    on the way and dropped again."""

    name: str
    """The name for messages and traces: `transformer.h.3`."""
    drop: list[OpOutput]


class RecomputePart(Lever, frozen=True, kw_only=True):
    """Which values of every forward pass to drop and recompute. What no group names is kept as
    long as without a plan."""

    groups: Annotated[list[RecomputeGroup], msgspec.Meta(max_length=100_000)]
    hold: list[OpOutput] = []
    """Values that autograd does not save and that are kept all the same, as inputs of groups; each
    until the last group that needs it has been recomputed."""
    calls: Count = 0
    """The number of calls in each pass, where several passes are in flight at once, as on a
    pipeline stage: a call of the n-th root module that a step called (from 0) is then call n modulo
    this of its pass. 0: calls are counted from the first after a backward pass."""
    kinds: list[list[str]] = []
    """Where passes differ and several kinds are planned: the root modules that each kind calls, in
    order, by class. `Net#1` is the second of class `Net` that the job called with gradients. Calls
    are numbered through all kinds. A pass is of each kind that begins with what it has called; it
    may call modules that no kind names."""
    budget_bytes: Count = 0
    """What it was made for; 0 for the least peak."""


class CompiledRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph that `torch.compile` captured, and what is recomputed in it."""

    graph: str
    """Hex digest of the names and operators of the joint graph's nodes, shapes left out."""
    name: str
    """The name for messages: the source line of its first operator."""
    recomputed: list[str]
    """Names of the nodes of forward that backward runs again."""


class RegionsPart(Lever, frozen=True, kw_only=True):
    """What is recomputed inside the graphs that PyTorch Inductor compiles. A graph that is not
    named runs as without a plan."""

    regions: list[CompiledRegion] = []
    share: Share = 0.0
    """Asked of a capture, for graphs that are not named: how far to go from no recomputation (0) to
    the least peak (1)."""
    beside: Count = 0
    """Asked likewise: so many other graphs hold what they keep for backward while one runs, as the
    blocks of a model do."""


class OrderPart(Part, frozen=True, kw_only=True):
    """The optimizer in backward: each parameter is updated as soon as its gradient is complete, and
    the gradient is released. The run does it only where that changes no number."""

    parameters: Count
    """Number of parameters with a gradient in a step."""
    gradient_bytes: Count
    """Bytes of their gradients, which no longer exist all at once."""
    from_first: bool = False
    """Whether it applies from the first step on, because a capture with the plan has shown that
    nothing prevents it. Otherwise the first step is watched, with all gradients alive."""
    clips: bool = False
    """Whether the script clips gradients by value. Each is clipped before its update then, and
    when the script does it, that is done."""
    clip_value: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Gradients are clipped to ± this. 0 asks a capture for it."""


class OffloadPart(Lever, frozen=True, kw_only=True):
    """Values that autograd saves, in the host's memory from forward to backward.

    A value is copied when autograd saves it, one after the other. The card's block is released
    once the values copied after it have more than `out_bytes` together, and the computing waits
    for its copy there. One that is not released when backward asks for it is used from the card.
    When backward, or a recomputation, asks for a value of the list, copies of the released ones
    after it are begun, in order, as far as they have `ahead_bytes` together; a value that none was
    begun of is fetched first.
    """

    values: list[OpOutput]
    """The values in the order in which backward first needs them."""
    out_bytes: Count
    """The most bytes, beside the oldest value, that are on the card while they are copied, or
    already copied, to the host."""
    ahead_bytes: Count
    """Fetched before backward asks for them, at most, beside the one that it asks for."""
    host_bytes: Count = 0
    """Promised, of page-locked memory."""


class StatePart(Lever, frozen=True, kw_only=True):
    """Optimizers' state in the host's memory. The update's arithmetic stays on the card."""

    share: Share
    """The share, in (0, 1], of the elements of an optimizer's parameters, in group order."""
    host_bytes: Count = 0
    """Promised, of state on the host."""


class GradViewsPart(Part, frozen=True, kw_only=True):
    """Gradients of DistributedDataParallel are views of its buckets, and not copies."""


class StepPart(Part, frozen=True, kw_only=True):
    """An optimizer's step updates a bucket of parameters at a time, so that temporaries of all of
    them are not alive together."""


class LowBitPart(Lever, frozen=True, kw_only=True):
    """Moments of Adam and AdamW in 8 bits, by torchao: another method, other numbers."""

    state_bytes: Count = 0
    """Promised, of all optimizers' state on the card."""


class FrozenPart(Lever, frozen=True, kw_only=True):
    """Weights that are not trained, in the host's memory. Each is copied to the card when the
    module that has it is called, and again when backward reads it; what followed it the last time
    is copied ahead."""

    share: Share
    """The share, in (0, 1], of the bytes of frozen weights, spread evenly over the model."""
    ahead_bytes: Count
    """Copied ahead of their use, at most, beside the one in use."""
    host_bytes: Count = 0
    """Promised, of page-locked memory."""


class Argument(msgspec.Struct, frozen=True, array_like=True):
    """An option of the script and the value that it gets."""

    option: str
    """The option as it is typed: `--batch-size`, or `batch_size` for `batch_size=8`."""
    value: int


class ArgumentsPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other values of the script's own options. They are set only where the script is started with
    the arguments that the plan was made from."""

    version: int = 1
    changes: list[Argument]


class LossHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A linear layer that gives logits: its weight's shape."""

    classes: Count
    features: Count


class LossPart(Part, frozen=True, kw_only=True):
    """Logits that are computed a chunk of rows at a time, where a loss reduces them. It changes
    the order of sums, so losses differ by rounding."""

    heads: list[LossHead]
    rows: Count
    """Number of rows in a chunk."""


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dynamic reusable space: what no planned request uses while those of a module span live."""

    module: str
    """Path of the module; empty outside of modules."""
    lower: int
    """First moment of the window over which it is free, on the plan's clock."""
    upper: int
    """End of the window; beyond the clock when it ends in the next round."""
    ranges: list[tuple[int, int]]
    """Free `[start, end)`, ascending."""


class AllocationPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Offsets for the requests of a job, in one arena."""

    version: int = 1
    device: int = 0
    requests: int
    """Rows of the columns."""
    setup: int = msgspec.field(name="prologue")
    """Number of requests before the first round. Files of the first version call it `prologue`."""
    start: int
    """Moments before the first round."""
    clock: int
    """Moments of one round."""
    steps: int = 1
    """Optimizer steps of one round."""
    arena_bytes: int
    """Height of the layout: no planned request ends beyond it."""
    load_bytes: int
    """The most bytes of planned requests alive at once; no layout is lower."""
    phases: list[str] = []
    """Names of the phases that the column `phase` numbers."""
    spaces: list[Space] = []
    """What the column `space` numbers."""
    columns: dict[str, bytes]
    """Each of `types.allocation.COLUMNS`: 64-bit little-endian numbers, compressed by Zstandard.
    `offset` is -1 for what the plan does not place; `space` is -1 or, for a dynamic request, where
    it may be placed (its bytes are then those of the step that was captured)."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan was made from."""

    script: str = ""
    command: list[str] = []
    torch_version: str = ""
    gpu: str = ""
    ranks: int = 0
    """Processes of the job; 0 where that is not known."""
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
    order: OrderPart | None = None
    regions: RegionsPart | None = None
    loss: LossPart | None = None
    state: StatePart | None = None
    grad_views: GradViewsPart | None = None
    step: StepPart | None = None
    low_bit: LowBitPart | None = None
    """Never together with `state`."""
    offload: OffloadPart | None = None
    frozen: FrozenPart | None = None
    arguments: ArgumentsPart | None = None
    allocation: AllocationPart | None = None
    """Addresses, from a capture with the rest of the plan in effect, because recomputation and
    order change the requests."""
