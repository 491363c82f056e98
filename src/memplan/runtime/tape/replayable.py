"""Which ops give their result again when they are run again, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from memplan.types.op_names import (
    CHANGES_STORAGE,
    FETCH,
    HIDDEN_STATE,
    RACES_ON_CUDA,
    UNINITIALISED,
    op_name,
)

_KNOWN = frozenset({"aten", "prims", "torchvision"})
"""Ops of other libraries may be written in Python, draw at random or keep a state, unsaid."""


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """What recording and replay need to know of an op; one object for each overload."""

    name: str
    """The op's name in plans. Ops of one name are counted together."""
    replayable: bool
    """Whether it may be run again at all."""
    random: bool
    dropout: int | None
    """Position of its `dropout_p`: it draws only where that is above 0."""
    races_on_cuda: bool
    uninitialised: bool
    """Whether its result is uninitialised memory."""
    written: tuple[tuple[int, str], ...]
    """Position and name of the arguments that it writes to, by its schema."""
    statistics: tuple[int, int, int] | None
    """For a batch norm: the positions of its running mean and variance and of its training flag."""

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call draws from a generator."""
        if not self.random or self.dropout is None:
            return self.random
        given = args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(given)


FETCHED = Traits(FETCH, True, False, None, False, False, (), None)
"""Traits of what is no op: a weight comes from the host."""


@cache
def traits_of(func: Any) -> Traits:
    names = [argument.name for argument in func._schema.arguments]
    statistics = _running_statistics(names)
    return Traits(
        name=op_name(func),
        replayable=func.namespace in _KNOWN
        and func._opname not in CHANGES_STORAGE | HIDDEN_STATE
        and (statistics is not None or "running_mean" not in names),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        dropout=names.index("dropout_p") if "dropout_p" in names else None,
        races_on_cuda=func._opname in RACES_ON_CUDA,
        uninitialised=func._opname in UNINITIALISED,
        written=tuple(
            (position, argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        statistics=statistics,
    )


def _running_statistics(names: list[str]) -> tuple[int, int, int] | None:
    flag = next((name for name in ("training", "train") if name in names), None)
    if flag is None or "running_mean" not in names or "running_var" not in names:
        return None
    return names.index("running_mean"), names.index("running_var"), names.index(flag)


@cache
def is_comparable(func: Any, output: int, dtype: torch.dtype) -> bool:
    """Whether every bit of an output is defined: reserves, padded sums of attention, and of a CTC
    loss what comes after the shorter targets of a batch are not."""
    if dtype == torch.uint8:
        return False
    return output == 0 or not func._opname.startswith(("_scaled_dot_product", "_ctc_loss"))


@dataclass(frozen=True)
class Scratch:
    """Used in place of running statistics. A batch norm in training updates them but does not read
    them for its result, so a replay updates scratch memory instead."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Scratch:
        return cls(tensor.size(), tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=self.device)
