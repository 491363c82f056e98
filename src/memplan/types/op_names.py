"""Operators as traces and plans name them."""

from __future__ import annotations

from functools import cache
from typing import Any

_SAME = {
    "aten.cudnn_batch_norm.default": "aten.native_batch_norm.default",
    "aten.cudnn_grid_sampler.default": "aten.grid_sampler_2d.default",
}
"""Operators that PyTorch takes in another's place where cuDNN is there, with the other's outputs
first. A plan made on a machine without a GPU must find them, and count them, on one with it."""

CHANGES_STORAGE = frozenset({"set_", "resize_", "resize_as_", "_resize_output_", "resize"})
HIDDEN_STATE = frozenset({"_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer"})
"""They advance a dropout state that their schema does not show as written, or leave parts of a
workspace that their backward reads as they found it."""
RACES_ON_CUDA = frozenset(
    {
        "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add",
        "index_add_", "index_put", "index_put_", "_index_put_impl_", "put_", "histc", "bincount",
        "cumsum", "kthvalue", "median", "scatter", "scatter_", "index_copy", "index_copy_",
        "max_unpool2d", "max_unpool3d", "nll_loss2d_forward",
    }
)  # fmt: skip
"""`torch.use_deterministic_algorithms` lists them: atomics add in any order, or ties are decided
by chance."""
UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Operators whose result is memory as it was found."""

FETCH = "memplan.fetch.default"
"""The name in a trace of a copy of a weight from the host to the device."""
STATE_TO_CARD, STATE_TO_HOST = "memplan.state_to_card", "memplan.state_to_host"
"""The names in a trace of copies of an optimizer's state that the plan keeps on the host."""
GRAPH_REPLAY = "cuda.graph_replay"
"""The name in a trace of a CUDA graph's replay: the operators `FIRST:STOP` run again."""


@cache
def op_name(func: Any) -> str:
    """The name of an operator's overload, such as `aten.mm.default`."""
    name = str(func)
    return _SAME.get(name, name)
