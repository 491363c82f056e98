"""Inference engines that take turns on the card with a training, and the stages of such a job."""

from __future__ import annotations

import math

import msgspec

GRAPH_NODE_BYTES = (0, 16 << 10, 64 << 10)
"""Low, expected and high bytes of the device for one kernel of an instantiated CUDA graph: the
driver does not say, and it has not been measured here, hence the wide bounds."""


class Stage(msgspec.Struct, frozen=True):
    """Events `[begin, end)` in which a job does something else than train."""

    name: str
    """`generation`, `weight sync` or `engine start`; empty where one gives way to the next."""
    begin: int
    end: int


class Sizes(msgspec.Struct, frozen=True):
    """Bytes between bounds."""

    low: int
    expected: int
    high: int

    def at_least(self, nbytes: int) -> Sizes:
        """None of the three below so many bytes."""
        return Sizes(*(max(size, nbytes) for size in (self.low, self.expected, self.high)))

    def divided(self, parts: int) -> Sizes:
        """One of so many equal parts."""
        return Sizes(*(size // parts for size in (self.low, self.expected, self.high)))


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An inference engine that shares the card with the job. Its storages have the role ENGINE and
    are named `<name>.weights`, `<name>.kv_cache` and so on."""

    name: str
    """The package, `vllm`, and from a job's second engine on its number: `vllm-2`."""
    model: str
    share: float
    """The share of the card's memory: vLLM's `gpu_memory_utilization`."""
    share_decides: bool = True
    """Whether the KV cache follows from the share, and not from a size that the job names."""
    card_bytes: int
    """All of the card's memory."""
    weight_bytes: int
    activations: Sizes
    """Activations of the profile run."""
    graphs: Sizes
    """CUDA graphs."""
    block_bytes: int
    """One block of the KV cache, in all layers."""
    layers: int
    """Each has its part of the KV cache in a tensor of its own."""
    least_blocks: int
    """The fewest blocks that hold one sequence of the greatest length."""
    sleeps: bool
    """Whether it has its memory in a pool that it can empty."""
    separate: bool
    """Whether it is a process of its own."""
    begin: int
    """The event at which it began."""

    @property
    def least_bytes(self) -> int:
        """The smallest KV cache with which it starts."""
        return self.least_blocks * self.block_bytes

    @property
    def activations_at_most(self) -> Sizes:
        """The activations as a request. A smaller card lacks nothing: they are in the share."""
        return Sizes(0, self.activations.expected, self.activations.expected)

    def requested_bytes(self, share: float) -> int:
        """What a share of the card is."""
        return math.ceil(self.card_bytes * share)

    def most_kv_bytes(self, share: float) -> int:
        """The KV cache where activations and graphs take least."""
        return self.requested_bytes(share) - (
            self.weight_bytes + self.activations.low + self.graphs.low
        )

    def kv_bytes(self, share: float) -> Sizes:
        """The KV cache at a share of the card: what is left of it; below 0 where it is too small.

        However much activations and graphs take, together they all fill the share: so the high
        bound is that beside graphs at theirs.
        """
        room = self.requested_bytes(share) - self.weight_bytes
        low = room - self.activations.high - self.graphs.high
        expected = room - self.activations.expected - self.graphs.expected
        high = max(room - self.activations.low - self.graphs.high, expected)
        return Sizes(*(n // self.block_bytes * self.block_bytes for n in (low, expected, high)))
