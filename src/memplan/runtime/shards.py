"""A rank's part of a distributed tensor (DTensor: FSDP2, tensor parallel), which is what lies on
its device."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def part_of(tensor: Tensor) -> Tensor:
    """The rank's part, which shares its memory; any other tensor itself."""
    kind: Any = _distributed()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # `to_local` of a parameter runs an operator
    found: Tensor = getattr(tensor, names[0])
    return found


def same_parts(one: Tensor, other: Tensor) -> bool:
    """Whether each rank has the same elements of both, and all of their value."""
    spread = [
        (getattr(tensor, "placements", ()), getattr(tensor, "device_mesh", None))
        for tensor in (one, other)
    ]
    return spread[0] == spread[1] and not any(place.is_partial() for place in spread[0][0])


def of_parts(part: Tensor, like: Tensor) -> Tensor:
    """The distributed tensor of which the rank has `part`, spread as `like` is and of its dtype;
    `part` itself where `like` is not distributed. The part may be on the host, as it is with
    FSDP2's `CPUOffloadPolicy`."""
    kind: Any = _distributed()
    if kind is None or not isinstance(like, kind):
        return part
    names, context = like.detach().__tensor_flatten__()
    inner = {name: getattr(like, name) for name in names}
    inner |= {name: part for name, one in inner.items() if isinstance(one, Tensor)}
    made: Tensor = kind.__tensor_unflatten__(inner, context, like.size(), like.stride())
    return made


def _distributed() -> type[Tensor] | None:
    """The class, where the program has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)
