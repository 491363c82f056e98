"""Functional collectives (`_c10d_functional`), which distributed tensors and traced code use.

PyTorch makes each of a tensor of its own and an asynchronous collective, whose handle
`wait_tensor` finds by the tensor (`torch/csrc/distributed/c10d/Functional.cpp`). So here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, Work

from memplan.capturing.distributed.collectives import Collectives
from memplan.capturing.operators.fake import run_fake
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.state import CaptureState

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional
_MODULE = "torch.distributed._functional_collectives"
_CONTEXT = "torch.distributed.tensor.experimental._context_parallel._cp_custom_ops"


class FunctionalCollectives:
    """Handlers of the operators."""

    def __init__(self, state: CaptureState, collectives: Collectives) -> None:
        self.state = state
        self.collectives = collectives
        self._pending: dict[int, Work] = {}
        """Pending work by the result's storage, which the handle keeps alive."""

    def handlers(self) -> dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]:
        """Handlers by operator, called with the operator, its arguments and keyword arguments."""
        answers: dict[Any, Callable[..., Any]] = {
            functional.all_reduce.default: partial(self._reduce, _copy),
            functional.all_reduce_.default: partial(self._reduce, _same),
            functional.all_reduce_coalesced.default: _each(partial(self._reduce, _copy)),
            functional.all_reduce_coalesced_.default: _each(partial(self._reduce, _same)),
            functional.broadcast.default: partial(self._broadcast, _copy),
            functional.broadcast_.default: partial(self._broadcast, _same),
            functional.all_gather_into_tensor.default: self._all_gather,
            functional.all_gather_into_tensor_out.default: self._all_gather,
            functional.all_gather_into_tensor_coalesced.default: _each(self._all_gather),
            functional.reduce_scatter_tensor.default: self._reduce_scatter,
            functional.reduce_scatter_tensor_out.default: self._reduce_scatter,
            functional.reduce_scatter_tensor_coalesced.default: _each(self._reduce_scatter),
            functional.all_to_all_single.default: self._all_to_all,
            functional.wait_tensor.default: self._wait,
            torch.ops._dtensor.shard_dim_alltoall.default: self._to_other_dimension,
        }
        return {func: _adapted(answer) for func, answer in answers.items()}

    def install(self, patches: Patches, watcher: ImportWatcher) -> None:
        """Install it until `patches.undo()`."""
        self.state.collectives.update(self.handlers())

        def adapt(module: ModuleType) -> None:
            # Its rule for fake tensors makes a tensor of its own; what runs wraps the one it gets.
            if hasattr(functional, "_wrap_tensor_autograd"):
                self.state.collectives[functional._wrap_tensor_autograd.default] = _adapted(
                    module.AsyncCollectiveTensor
                )

        watcher.add(_MODULE, adapt)
        watcher.add(_CONTEXT, self._run_bodies)

    def _run_bodies(self, module: ModuleType) -> None:
        """Context parallelism's own operators are made of collectives in Python; their rules for
        fake tensors tell only what comes out."""
        for name in ("flex_cp_allgather", "flex_cp_allgather_backward"):
            made = getattr(module, name, None)
            if made is not None:
                self.state.collectives[made._opoverload] = self._inside(made._init_fn)

    def _inside(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def run(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self.state.mode:
                return body(*args, **kwargs)

        return run

    def clear(self) -> None:
        """Forget what was never waited for."""
        self._pending.clear()

    def _reduce(self, begin: Any, x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        out = begin(self, x)
        return self._started(c10d.allreduce_.default, group, out, out, op.upper())

    def _broadcast(self, begin: Any, x: torch.Tensor, root: int, group: Any) -> torch.Tensor:
        out = begin(self, x)
        return self._started(c10d.broadcast_.default, group, out, out, root=root)

    def _all_gather(
        self, x: torch.Tensor, size: int, group: Any, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = self._empty(x, [x.shape[0] * size, *x.shape[1:]] if x.dim() else [size])
        return self._started(c10d._allgather_base_.default, group, x, out)

    def _reduce_scatter(
        self, x: torch.Tensor, op: str, size: int, group: Any, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = self._empty(x, [x.shape[0] // size, *x.shape[1:]])
        return self._started(c10d._reduce_scatter_base_.default, group, x, out, op.upper())

    def _all_to_all(
        self, x: torch.Tensor, receives: Sequence[int], sends: Sequence[int], group: Any
    ) -> torch.Tensor:
        out = self._empty(x, [sum(receives), *x.shape[1:]])
        args = (out, x, None, list(receives), list(sends))
        return self._started(c10d.alltoall_base_.default, group, x, out, args=args)

    def _to_other_dimension(
        self, x: torch.Tensor, gather_dim: int, shard_dim: int, group: Any
    ) -> torch.Tensor:
        """Split in one dimension from now on and not in another: the parts side by side, as many
        received, and those put together."""
        if not isinstance(group, ProcessGroup):
            group = _resolve_process_group(group)
        size = group.size()
        shape = list(x.shape)
        shape[shard_dim] //= size
        with self.state.mode:
            parts = x.view([*shape[:shard_dim], size, *shape[shard_dim:]])
            sent = parts.movedim(shard_dim, 0).contiguous()
            received = torch.empty_like(sent)
        args: tuple[Any, ...] = (received, sent, None, [], [])
        func = c10d.alltoall_base_.default
        self.collectives.start(func, group, sent, received, args=args).wait()
        shape[gather_dim] *= size
        with self.state.mode:
            return received.movedim(0, gather_dim).contiguous().view(shape)

    def _wait(self, x: torch.Tensor) -> torch.Tensor:
        work = self._pending.pop(x.untyped_storage()._cdata, None)
        if work is not None:
            work.wait()
        return x

    def _started(
        self,
        func: Any,
        group: Any,
        given: torch.Tensor,
        out: torch.Tensor,
        op: str = "AVG",
        args: tuple[Any, ...] = (),
        root: int = 0,
    ) -> torch.Tensor:
        if not isinstance(group, ProcessGroup):
            group = _resolve_process_group(group)
        work = self.collectives.start(func, group, given, out, op, args, root)
        self._pending[out.untyped_storage()._cdata] = work
        return out

    def _empty(self, like: torch.Tensor, shape: list[int]) -> torch.Tensor:
        options = {"dtype": like.dtype, "device": like.device}
        if not isinstance(like, FakeTensor):
            return torch.empty(shape, **options)  # type: ignore[call-overload, no-any-return]
        made: torch.Tensor = run_fake(self.state, aten.empty.memory_format, (shape,), options)
        return made


def _copy(own: FunctionalCollectives, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, FakeTensor):
        return x.clone(memory_format=torch.contiguous_format)
    layout = {"memory_format": torch.contiguous_format}
    made: torch.Tensor = run_fake(own.state, aten.clone.default, (x,), layout)
    return made


def _same(_own: FunctionalCollectives, x: torch.Tensor) -> torch.Tensor:
    return x


def _each(answer: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    return lambda tensors, *args: [answer(tensor, *args) for tensor in tensors]


def _adapted(answer: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    return lambda _func, args, kwargs: answer(*args, **kwargs)
