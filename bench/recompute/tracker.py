"""The peak of a real CPU training step, in bytes of storages as the dispatcher sees them.

Two ways to measure were weighed.

*A dispatch mode* with weak references on the storages that operators return sees exactly the
storages wanted, but changes the step: while any mode is active the autograd engine adds gradients
that meet (a residual connection) into a new tensor instead of in place. That raises the peak of
models with such connections. `dispatched_peak` does it that way; it serves as a cross-check on
models without fan-in.

*The CPU allocator's own record* (`torch.profiler`, `profile_memory`) is what `measure` uses: every
allocation and release with its address, size and place among the operators, with no mode active,
so that the step is the one the user would run. It also holds what the dispatcher never sees, the
scratch memory of kernels (oneDNN's reordered weights, for one). An allocation that begins and ends
within one operator call is such scratch: the call meant is the outermost one below autograd, as a
dispatch mode would see it, so operators that are only compositions of others do not count.

Both count requested bytes. What exists before the step is not observed: it is added from what the
caller names as resident, and should not die within the step, for its release would not be seen.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Peak:
    """Peaks of one step. Bytes as requested; each peak is over its own timeline."""

    base_bytes: int
    """Storages alive before the step: weights, buffers, optimizer state, inputs."""
    beyond_bytes: int
    """Peak of dispatcher-visible storages that the step made: activations and gradients."""
    activation_bytes: int
    """The same without the gradients that parameters hold at the end of the step."""
    allocator_bytes: int
    """Peak of everything the CPU allocator handed out in the step, kernels' scratch included."""

    @property
    def peak_bytes(self) -> int:
        """What was alive before and what the step added at its peak."""
        return self.base_bytes + self.beyond_bytes


@dataclass
class _Block:
    """One allocation; `begin` and `end` are positions among all memory events."""

    nbytes: int
    address: int
    begin: int
    end: int | None
    call: int
    """The operator call that it was made in, 0 outside of any."""
    scratch: bool = False


def measure(
    step: Callable[[], object],
    resident: Iterable[torch.Tensor],
    parameters: Iterable[torch.Tensor] = (),
) -> Peak:
    """Run `step` once and tell its peaks.

    `resident` are the tensors that exist before it; `parameters` those whose `.grad` after it is
    left out of `activation_bytes`. Raises RuntimeError when the profiler lost memory events.
    """
    base = storage_bytes(resident)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    kineto = record.profiler.kineto_results
    blocks, events = _blocks(kineto.experimental_event_tree())
    visible = [block for block in blocks if not block.scratch]
    owned = {p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}
    activations = [b for b in visible if b.end is not None or b.address not in owned]
    return Peak(
        base_bytes=base,
        beyond_bytes=_peak(visible, events),
        activation_bytes=_peak(activations, events),
        allocator_bytes=_peak(blocks, events),
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages below some tensors."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def _blocks(roots: list[Any]) -> tuple[list[_Block], int]:
    """(blocks in order of allocation, number of memory events) of a profiler's event tree."""
    found = sorted(_memory_events(roots), key=lambda event: event[0])
    blocks: list[_Block] = []
    alive: dict[int, _Block] = {}
    expected: int | None = None
    for position, (_, fields, call) in enumerate(found):
        nbytes, address = fields.alloc_size, fields.ptr
        if expected is not None and fields.total_allocated != expected + nbytes:
            raise RuntimeError("the profiler lost memory events; the peak would be wrong")
        expected = fields.total_allocated
        if nbytes > 0:
            alive[address] = _Block(nbytes, address, position, None, call)
            blocks.append(alive[address])
        elif address in alive:  # not what an earlier measurement saw allocated
            block = alive.pop(address)
            block.end = position
            block.scratch = call != 0 and call == block.call
    return blocks, len(found)


def _memory_events(roots: list[Any]) -> Iterator[tuple[int, Any, int]]:
    """(nanoseconds, fields, operator call) of each event of the allocator."""
    calls = 0
    pending = [(event, 0) for event in reversed(roots)]
    while pending:
        event, call = pending.pop()
        tag = event.tag.name
        if tag == "Allocation":
            if event.extra_fields.device.type == "cpu":
                yield event.start_time_ns, event.extra_fields, call
        elif tag == "TorchOp" and call == 0 and _dispatched(event.name):
            calls += 1
            call = calls
        pending.extend((child, call) for child in reversed(event.children))


@functools.cache
def _dispatched(name: str) -> bool:
    """Whether a profiled call reaches the dispatcher's keys below autograd by itself."""
    if "::" not in name or name.startswith(("autograd::", "torch::")):
        return False
    schemas = torch._C._jit_get_schemas_for_operator(name)
    overloads = [f"{s.name}.{s.overload_name}".removesuffix(".") for s in schemas]
    composite = "CompositeImplicitAutograd"
    return any(
        not torch._C._dispatch_has_kernel_for_dispatch_key(overload, composite)
        for overload in overloads
        if torch._C._dispatch_has_kernel(overload)
    )


def _peak(blocks: list[_Block], events: int) -> int:
    changes = [0] * (events + 1)
    for block in blocks:
        changes[block.begin] += block.nbytes
        if block.end is not None:
            changes[block.end] -= block.nbytes
    alive, peak = 0, 0
    for change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


class _Storages(TorchDispatchMode):
    """Sums the storages that operators returned and that are still alive."""

    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.peak = 0, 0
        self.known = {t.untyped_storage()._cdata for t in resident}

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self.peak = max(self.peak, self.alive)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.alive += nbytes
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.alive -= nbytes


def dispatched_peak(step: Callable[[], object], resident: Iterable[torch.Tensor]) -> int:
    """`Peak.beyond_bytes` as a dispatch mode sees it: too high where gradients meet."""
    gc.collect()
    with _Storages(resident) as storages:
        step()
    return int(storages.peak)
