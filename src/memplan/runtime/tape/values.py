"""What a tape is made of: versions of storages, the ops that made them, and views of them.

The objects form a graph that only points backwards, from a value to the op that made it and on to
that op's inputs. Nothing else keeps it alive: a handle in autograd's graph holds a value, and once
backward lets go of the handle, whatever only that value's recomputation needed goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memplan.runtime.tape.settings import current_settings

if TYPE_CHECKING:
    from memplan.runtime.tape.groups import Group
    from memplan.runtime.tape.offload import Away


class Value:
    """One version of the content of a storage.

    It is *available* while `base` holds a tensor on that storage. Otherwise `away` fetches it from
    the host, or `producer` makes it again: every op on the way back to values that are available or
    away can be replayed.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "base",
        "group",
        "output",
        "producer",
        "uninitialised",
        "version",
    )

    def __init__(self, producer: OpRecord | None, output: int) -> None:
        self.base: torch.Tensor | None = None
        self.version = 0
        """`base._version` when `base` was taken; it must not change."""
        self.producer = producer
        self.output = output
        """Which tensor of the producer's result, or of the arguments that it writes, negative."""
        self.group: Group | None = None
        """The group to drop it with; None: keep it when autograd saves it."""
        self.uninitialised = False
        self.away: Away | None = None
        """Set once the value is offloaded."""

    def keep(self, base: torch.Tensor) -> None:
        """Make it available from now on; what would have recomputed it is no longer needed."""
        self.base = base
        self.version = version_of(base)
        self.producer = None

    def modified(self) -> bool:
        """Whether what `base` shows, or what was saved of it, is no longer this version."""
        if self.away is not None and self.away.modified():
            return True
        return self.base is not None and version_of(self.base) != self.version


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def flat_tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of an op's result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in flat_tensors(item)]
    return []


@dataclass(slots=True, eq=False)
class View:
    """A tensor as a value and a geometry, in elements of its dtype."""

    value: Value
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, value: Value) -> View:
        return cls(
            value,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor, on the storage of `base`; `base` itself where it is the same view."""
        if (
            base.dtype == self.dtype
            and base.size() == self.size
            and base.stride() == self.stride
            and base.storage_offset() == self.offset
            and base.is_conj() == self.conjugated
            and base.is_neg() == self.negated
        ):
            return base
        if base.dtype != self.dtype:
            empty = torch.empty(0, dtype=self.dtype, device=base.device)
            base = empty.set_(base.untyped_storage())
        elif base.is_conj() or base.is_neg():
            base = torch.empty(0, dtype=self.dtype, device=base.device).set_(base.untyped_storage())
        tensor = base.as_strided(self.size, self.stride, self.offset)
        if self.conjugated:
            tensor = tensor.conj()
        if self.negated:
            tensor = torch._neg_view(tensor)
        return tensor


class OpRecord:
    """A recorded op: enough to run it again."""

    __slots__ = (
        "args",
        "func",
        "generator",
        "grad",
        "inputs",
        "kwargs",
        "nth",
        "number",
        "settings",
        "state",
        "written",
    )

    def __init__(
        self, func: Any, number: int, nth: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func = func
        self.number = number
        """Position in the call."""
        self.nth = nth
        self.args = args
        """The arguments with a `View` for every tensor."""
        self.kwargs = kwargs
        self.grad = torch.is_grad_enabled()
        """Some kernels choose by it what they compute."""
        self.settings = current_settings()
        self.inputs: list[Value] = []
        """What the views in its arguments are of."""
        self.written: list[Value] = []
        """The versions that the op overwrites, in the order of its arguments."""
        self.generator: torch.Generator | None = None
        self.state: torch.Tensor | None = None
        """The generator's state before the op."""

    def __str__(self) -> str:
        return f"{self.func} (number {self.nth + 1} of its kind)"
