"""Functions that read a tensor's values where PyTorch's dispatcher does not see it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.nested import tensors_in
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.recording import Recorder

_READERS = frozenset(
    {"tensor_split", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu"}
)
"""Of the last ones it is the lengths of a packed sequence that are read."""


class ValueReaders(TorchFunctionMode):
    """While entered, they are refused, unless what they read is the same in each step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READERS:
            with torch._C.DisableTorchFunction():
                self._recorder.guarded(self._check, name, [list(args[:2]), *kwargs.values()])
        return func(*args, **kwargs)

    def _check(self, name: str, given: list[Any]) -> None:
        for tensor in tensors_in(given):
            if tensor.dtype is torch.int64 and not self._recorder.tensors.is_fixed(tensor):
                raise NotCapturable(
                    f"{name}() with sizes that come from a tensor",
                    refused_at(),
                    "give the sizes as a list of numbers",
                )
