"""What another rank broadcasts, where it is not what the receiver has already.

Every rank is taken to have what this one has: weights, and counters that training made. Until the
first optimizer step whole numbers are not taken so: flags, sizes and counts are sent because ranks
differ (Megatron-LM: whether there is data to train on). Nor is a placeholder, ever: zeros, an
`empty`, a `None`. When the script looks at such a value, or at what it computed from it, the sender
is asked, that is, the script is run as that rank (`peers`). What is sent after the sender's first
optimizer step is like what was sent last.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optim_module

from memplan.capturing.distributed.peers import Peers, ToldAllError
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError

_SMALL = 4096
"""Elements: what the host decides by is not larger."""
_ALIKE = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
"""Files of PyTorch that make buckets, parameters and buffers equal on all ranks."""

_Stream = tuple[int, tuple[int, ...], str]
"""Who sends, to whom, and whether tensors or objects."""


class Broadcasts:
    """The broadcasts of a capture, numbered by sender and group."""

    def __init__(self, state: CaptureState, peers: Peers) -> None:
        self.state = state
        self.peers = peers
        self._counts: Counter[_Stream] = Counter()
        self._steps = 0

    def install(self, stack: ExitStack) -> None:
        """Counts steps, and answers what may be asked of this rank at the end of its first."""
        hook = optim_module.register_optimizer_step_post_hook(self._stepped)
        stack.callback(hook.remove)

    def _stepped(self, *_args: Any) -> None:
        if not self.state.context.backward_seen:
            return
        self._steps += 1
        if self.peers.answering and self._steps == 1:
            self.peers.tell(_counts_of(distributed.get_rank()), dict(self._counts))
            self.peers.stepped()

    # Tensors

    def tensor(self, tensor: torch.Tensor, group: Any, root: int) -> None:
        """`tensor` is broadcast by the rank `root` of `group`."""
        caller = self.state.caller
        if tensor.numel() > _SMALL:
            return
        if caller is not None and caller.f_code.co_filename.endswith(_ALIKE):
            return
        stream = _stream(group, root, "tensors")
        self._counts[stream] += 1
        number = self._counts[stream]
        if group.rank() == root:
            if self.peers.answering:
                value = self._known(tensor)
                self.peers.tell(_key(stream, number), None if value is None else _plain(value))
            return
        own = self._known(tensor)
        if own is not None and self._is_as_sent(own):
            return
        shape, dtype = tensor.shape, tensor.dtype

        def received() -> torch.Tensor | None:
            if self.peers.link is None:
                self._nobody(stream[0])
                return own
            data = self._ask(stream, number)
            if data is None:
                return own
            value = torch.tensor(data, dtype=dtype, device="cpu")
            return value.reshape(shape) if value.numel() == shape.numel() else own

        if isinstance(tensor, FakeTensor):
            self.state.values.later(tensor, received)
        elif self.peers.link is not None:
            value = received()
            if value is not None:
                tensor.detach().copy_(value)

    def _is_as_sent(self, own: torch.Tensor) -> bool:
        """Whether what the receiver has is taken for what the sender has."""
        decided = own.is_floating_point() or own.is_complex() or self._steps > 0
        return decided and bool(own.count_nonzero())

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.state.values.of(tensor) if isinstance(tensor, FakeTensor) else tensor.detach()

    # Objects

    def objects(self, objects: list[Any], group: Any, root: int) -> bool:
        """The same of a list of objects; whether the receiver has what was sent."""
        stream = _stream(group, root, "objects")
        self._counts[stream] += 1
        number = self._counts[stream]
        if group.rank() == root:
            self.peers.tell(_key(stream, number), list(objects))
            return True
        if self.peers.link is None or all(item is not None for item in objects):
            return False
        told = self._ask(stream, number)
        if not isinstance(told, list) or len(told) != len(objects):
            return False
        objects[:] = told
        return True

    # Asking

    def _nobody(self, sender: int) -> None:
        self.state.assume(
            "rank",
            f"what rank {sender} broadcasts is what this rank has already: it can be asked for on "
            "the command line only, once in a process",
            op="broadcast",
        )

    def _ask(self, stream: _Stream, number: int) -> Any:
        """What was sent; None where the sender does not know it either.

        Raises CaptureError where the sender cannot be run: the script looks at it, and what it does
        then would be another thing than it does on the GPUs."""
        sender = stream[0]
        try:
            try:
                return self.peers.ask(sender, _key(stream, number))
            except ToldAllError:
                counts = self.peers.ask(sender, _counts_of(sender))
                if not counts.get(stream):
                    return self.peers.ask(sender, _key(stream, number), beyond=True)
                return self.peers.ask(sender, _key(stream, min(number, counts[stream])))
        except CaptureError as error:
            raise CaptureError(
                f"{self.state.source()}: rank {distributed.get_rank()} goes by what rank {sender} "
                f"broadcasts, and that could not be had: {error.message}",
                error.hint or f"memplan estimate --rank {sender} …, to see what that rank needs",
            ) from error


def _stream(group: Any, root: int, what: str) -> _Stream:
    ranks = tuple(distributed.get_process_group_ranks(group))
    return ranks[root], ranks, what


def _key(stream: _Stream, number: int) -> str:
    sender, ranks, what = stream
    return f"{sender} broadcasts {what} to {','.join(map(str, ranks))}: {number}"


def _counts_of(rank: int) -> str:
    return f"{rank} broadcast in its first step"


def _plain(value: torch.Tensor) -> list[Any]:
    """Numbers: a tensor would be sent in shared memory."""
    return list(value.flatten().tolist())
