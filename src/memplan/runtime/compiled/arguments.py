"""The arguments of a call as leaves: tensors and plain values, and the shape that holds them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree


def flatten_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves of `(args, kwargs)` and their spec, as `tree_flatten` has them.

    A `UserDict` (such as the batches that Transformers' collators make) is one of its kind of
    dict: PyTorch would take it for a leaf, and the next batch for another value.
    """
    return pytree.tree_flatten(
        pytree.tree_map(_opened, (args, dict(kwargs)), is_leaf=_is_user_dict)
    )


def _is_user_dict(item: Any) -> bool:
    return isinstance(item, UserDict)


def _opened(item: Any) -> Any:
    return {type(item).__qualname__: dict(item.data)} if _is_user_dict(item) else item
