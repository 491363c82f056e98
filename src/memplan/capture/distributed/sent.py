"""What another rank broadcasts, where it is not what the receiver has already.

Every rank is taken to have what this one has: weights, and counters that training made. Until the
first optimizer step whole numbers are not taken so: flags, sizes and counts are sent because ranks
differ (Megatron-LM: whether there is data to train on). Nor is a placeholder, ever: zeros, an
`empty`, a `None`. When the script looks at such a value, the sender is asked, that is, the script
is run as that rank (`peers`): first up to this broadcast, and where that is not enough up to the
end of its first optimizer step. What is sent later is like what was sent in that step.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optim_module

from memplan.types.errors import CaptureError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from memplan.capture.distributed.peers import Peers
    from memplan.capture.mode import CaptureMode

UNTOLD = "could not be had"
_SMALL = 256
"""Elements: what the host decides by is not larger."""

_Stream = tuple[int, tuple[int, ...], str]
"""Who sends, to whom, and whether tensors or objects."""


class Broadcasts:
    """The broadcasts of a capture, numbered by sender and group."""

    def __init__(self, mode: CaptureMode, peers: Peers) -> None:
        self.mode = mode
        self.peers = peers
        self._counts: Counter[_Stream] = Counter()
        self._steps = 0
        self._silent: set[int] = set()
        """Senders that could not be run so far."""

    def install(self, stack: ExitStack) -> None:
        """Counts steps, and answers what may be asked of this rank at the end of its first."""
        hook = optim_module.register_optimizer_step_post_hook(self._stepped)
        stack.callback(hook.remove)

    def _stepped(self, *_args: Any) -> None:
        if not self.mode.context.backward_seen:
            return
        self._steps += 1
        if self.peers.answers is not None:
            self.peers.tell(_after_step(distributed.get_rank()), self._steps)

    # Tensors

    def tensor(self, tensor: torch.Tensor, group: Any, root: int) -> None:
        """`tensor` is broadcast by the rank `root` of `group`."""
        if tensor.numel() > _SMALL:
            return
        stream = _stream(group, root, "tensors")
        self._counts[stream] += 1
        number = self._counts[stream]
        if group.rank() == root:
            if self.peers.answers is not None:
                value = self._known(tensor)
                self.peers.tell(_key(stream, number), None if value is None else _plain(value))
            return
        if self.peers.questions is None:
            return
        own = self._known(tensor)
        if own is not None and self._is_as_sent(own):
            return
        shape, dtype = tensor.shape, tensor.dtype

        def received() -> torch.Tensor | None:
            data = self._ask(stream, number)
            if data is None:
                return own
            value = torch.tensor(data, dtype=dtype, device="cpu")
            return value.reshape(shape) if value.numel() == shape.numel() else own

        if isinstance(tensor, FakeTensor):
            self.mode.values.later(tensor, received)
        else:
            value = received()
            if value is not None:
                tensor.detach().copy_(value)

    def _is_as_sent(self, own: torch.Tensor) -> bool:
        """Whether what the receiver has is taken for what the sender has."""
        decided = own.is_floating_point() or own.is_complex() or self._steps > 0
        return decided and bool(own.count_nonzero())

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.mode.values.of(tensor) if isinstance(tensor, FakeTensor) else tensor.detach()

    # Objects

    def objects(self, objects: list[Any], group: Any, root: int) -> bool:
        """The same of a list of objects; whether the receiver has what was sent."""
        stream = _stream(group, root, "objects")
        self._counts[stream] += 1
        number = self._counts[stream]
        if group.rank() == root:
            if self.peers.answers is not None:
                self.peers.tell(_key(stream, number), list(objects))
            return True
        if self.peers.questions is None or all(item is not None for item in objects):
            return False
        told = self._ask(stream, number)
        if not isinstance(told, list) or len(told) != len(objects):
            return False
        objects[:] = told
        return True

    # Asking

    def _ask(self, stream: _Stream, number: int) -> Any:
        """What was sent; None where it cannot be had."""
        known, sender = self.peers.known, stream[0]
        key = _key(stream, number)
        if key in known or sender in self._silent:
            return _known_until(known, stream, number)
        try:
            if any(_sender(item) == sender for item in known):
                self.peers.ask(sender, _after_step(sender))
            if _known_until(known, stream, number) is None:  # the first, or after that step
                self.peers.ask(sender, key)
        except CaptureError as error:
            self._silent.add(sender)
            self.mode.assumptions.add(
                "rank",
                f"what rank {sender} broadcasts {UNTOLD} ({error.message}); this rank "
                "is taken to have it already",
                op="broadcast",
                source=self.mode.source(),
            )
        return _known_until(known, stream, number)


def _known_until(known: dict[str, Any], stream: _Stream, number: int) -> Any:
    """What was sent with that number, or last before it."""
    sent = (known.get(_key(stream, earlier)) for earlier in range(number, 0, -1))
    return next((item for item in sent if item is not None), None)


def _stream(group: Any, root: int, what: str) -> _Stream:
    ranks = tuple(distributed.get_process_group_ranks(group))
    return ranks[root], ranks, what


def _key(stream: _Stream, number: int) -> str:
    sender, ranks, what = stream
    return f"{sender} broadcasts {what} to {','.join(map(str, ranks))}: {number}"


def _after_step(rank: int) -> str:
    return f"{rank} broadcasts until it has stepped"


def _sender(key: str) -> int | None:
    number, verb, _ = (*key.split(" ", 2), "", "")[:3]
    return int(number) if verb == "broadcasts" and number.isdigit() else None


def _plain(value: torch.Tensor) -> list[Any]:
    """Numbers: a tensor would be sent in shared memory."""
    return list(value.flatten().tolist())
