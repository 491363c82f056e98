"""Collectives of the `c10d` operators: recorded, and their values worked out.

No kernel runs. What a collective writes is what it would be if every rank had put in this rank's
values (`arithmetic`). One that is asynchronous runs on its communicator's stream, with the events
that `ProcessGroupNCCL` records and waits for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from memplan.capturing.distributed import arithmetic
from memplan.capturing.distributed.arithmetic import Value
from memplan.capturing.distributed.broadcasts import Broadcasts
from memplan.capturing.distributed.communicators import Communicators
from memplan.capturing.distributed.works import Batch, RankWork, Works, finished
from memplan.capturing.fake.arguments import flat
from memplan.capturing.state import CaptureState
from memplan.types.trace import EventKind, Role

c10d = torch.ops.c10d


@dataclass(frozen=True)
class Call:
    kind: str
    inputs: list[Any]
    outputs: list[Any]
    """Tensors, or lists of tensors where the operator takes one for each rank."""
    rank: int
    size: int
    op: str
    args: tuple[Any, ...]


Known = Callable[[torch.Tensor], Value]
Written = Iterator[tuple[torch.Tensor, Value]]
Rule = Callable[[Call, Known], Written]


@dataclass(frozen=True)
class _Form:
    """The positions of an operator's arguments, and what it does to values."""

    kind: str
    inputs: int
    outputs: int
    group: int
    rule: Rule
    reduces: int | None = None
    returns: bool = True
    """Whether it returns its outputs beside the handle."""


def _each(call: Call, known: Known) -> Written:
    for out, source in zip(call.outputs, call.inputs, strict=True):
        yield out, arithmetic.reduced(known(source), call.op, call.size)


def _keep(call: Call, known: Known) -> Written:
    return ((out, known(out)) for out in call.outputs)


def _lose(call: Call, known: Known) -> Written:
    return ((out, None) for out in call.outputs)


def _copy_to_all(call: Call, known: Known) -> Written:
    for outs, source in zip(call.outputs, call.inputs, strict=False):
        value = known(source)
        for out in outs:
            yield out, value if value is None or value.shape == out.shape else None


def _copy_coalesced(call: Call, known: Known) -> Written:
    for outs in call.outputs:  # a list for each rank
        for out, source in zip(outs, call.inputs, strict=False):
            yield out, known(source)


def _gather_flat(call: Call, known: Known) -> Written:
    for out, source in zip(call.outputs, call.inputs, strict=True):
        yield out, arithmetic.gathered(known(source), call.size)


def _scatter_flat(call: Call, known: Known) -> Written:
    for out, source in zip(call.outputs, call.inputs, strict=True):
        own = arithmetic.part(known(source), call.rank, call.size)
        yield out, arithmetic.reduced(own, call.op, call.size)


def _own_of_list(call: Call, known: Known) -> Written:
    for out, sources in itertools.zip_longest(call.outputs, call.inputs):
        own = known(sources[call.rank]) if sources else None
        yield out, arithmetic.reduced(own, call.op, call.size)


def _exchange(call: Call, known: Known) -> Written:
    value = known(call.inputs[0])
    receives, sends = call.args[3], call.args[4]
    yield call.outputs[0], arithmetic.exchanged(value, call.rank, call.size, sends, receives)


def _exchange_list(call: Call, known: Known) -> Written:
    value = known(call.inputs[call.rank])
    for out in call.outputs:
        yield out, value if value is not None and value.shape == out.shape else None


_FORMS: dict[Any, _Form] = {
    c10d.allreduce_.default: _Form("all_reduce", 0, 0, 1, _each, reduces=2),
    c10d.allreduce_coalesced_.default: _Form(
        "all_reduce", 0, 0, 1, _each, reduces=2, returns=False
    ),
    c10d.reduce_.default: _Form("reduce", 0, 0, 1, _each, reduces=2, returns=False),
    c10d.broadcast_.default: _Form("broadcast", 0, 0, 1, _keep),
    c10d.allgather_.default: _Form("all_gather", 1, 0, 2, _copy_to_all),
    c10d.allgather_coalesced_.default: _Form("all_gather", 1, 0, 2, _copy_coalesced, returns=False),
    c10d._allgather_base_.default: _Form("all_gather", 1, 0, 2, _gather_flat),
    c10d.allgather_into_tensor_coalesced_.default: _Form(
        "all_gather", 1, 0, 2, _gather_flat, returns=False
    ),
    c10d.gather_.default: _Form("gather", 1, 0, 2, _copy_to_all, returns=False),
    c10d.scatter_.default: _Form("scatter", 1, 0, 2, _own_of_list),
    c10d.reduce_scatter_.default: _Form("reduce_scatter", 1, 0, 2, _own_of_list, reduces=3),
    c10d._reduce_scatter_base_.default: _Form("reduce_scatter", 1, 0, 2, _scatter_flat, reduces=3),
    c10d.reduce_scatter_tensor_coalesced_.default: _Form(
        "reduce_scatter", 1, 0, 2, _scatter_flat, reduces=3, returns=False
    ),
    c10d.alltoall_base_.default: _Form("all_to_all", 1, 0, 2, _exchange, returns=False),
    c10d.alltoall_.default: _Form("all_to_all", 1, 0, 2, _exchange_list),
    c10d.send.default: _Form("send", 0, 0, 1, _keep, returns=False),
    c10d.recv_.default: _Form("recv", 0, 0, 1, _lose, returns=False),
    c10d.recv_any_source_.default: _Form("recv", 0, 0, 1, _lose, returns=False),
    c10d.barrier.default: _Form("barrier", 0, 0, 1, _keep, returns=False),
}
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_POINT_TO_POINT = ("send", "recv")


class Collectives:
    """Handlers of the operators."""

    def __init__(
        self, state: CaptureState, communicators: Communicators, broadcasts: Broadcasts
    ) -> None:
        self.state = state
        self.broadcasts = broadcasts
        self.communicators = communicators
        self.works = Works()
        state.recorder.before_event = self.works.let_go
        self.batches: dict[str, Batch] = {}
        """Open batches, by the name of their group."""
        self._async_at = {
            func: next(
                (i for i, arg in enumerate(func._schema.arguments) if arg.name == "async_op"), -1
            )
            for func in _FORMS
        }

    def handlers(self) -> dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]:
        """Handlers by operator, called with the operator, its arguments and keyword arguments."""
        return dict.fromkeys(_FORMS, self._run)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = _FORMS[func]
        group = ProcessGroup.unbox(args[form.group])
        op = _op_name(args[form.reduces]) if form.reduces is not None else "AVG"
        root = int(args[2]) if form.kind == "broadcast" else 0
        work = self.start(func, group, args[form.inputs], args[form.outputs], op, args, root)
        handle = Work.boxed(work)
        return (args[form.outputs], handle) if form.returns else handle

    def start(
        self,
        func: Any,
        group: ProcessGroup,
        given: Any,
        result: Any,
        op: str = "AVG",
        args: tuple[Any, ...] = (),
        root: int = 0,
    ) -> Work:
        """Record the operator `func` on tensors of a group, and work out what it writes.

        `args` are its arguments, where they say more (splits, `async_op`); `root` is the
        rank in the group that broadcasts.
        """
        form = _FORMS[func]
        call = Call(
            kind=form.kind,
            inputs=_listed(given),
            outputs=_listed(result),
            rank=group.rank(),
            size=group.size(),
            op=op,
            args=args,
        )
        inputs, outputs = (flat(items, torch.Tensor) for items in (call.inputs, call.outputs))
        work = self._record(func, form, group, call, inputs, outputs)
        if form.kind == "broadcast":
            for out in outputs:
                self.broadcasts.tensor(out, group, root)
            return work
        for out, value in form.rule(call, self._known):
            self._put(out, value, inputs)
            if call.size > 1 and isinstance(out, FakeTensor):
                self.state.values.note_alike(out)
        return work

    def by_nccl(self, group: ProcessGroup, device: torch.device) -> bool:
        """Whether a group's tensors on a device travel by NCCL."""
        return device.type == self.state.device_type and self.communicators.has_nccl(group)

    # Memory

    def _record(
        self,
        func: Any,
        form: _Form,
        group: Any,
        call: Call,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> Work:
        state = self.state
        fakes = [item for item in (*inputs, *outputs) if isinstance(item, FakeTensor)]
        if not any(item.fake_device.type == state.device_type for item in fakes):
            return finished(outputs)
        peer = int(call.args[2]) if form.kind in _POINT_TO_POINT else None
        batch = self.batches.get(group.group_name)
        own_stream = self.communicators.used(group, form.kind, peer, batched=batch is not None)
        position = self._async_at[func]
        asynchronous = form.kind in _POINT_TO_POINT or (
            position >= 0 and (len(call.args) <= position or bool(call.args[position]))
        )
        recorder = state.recorder
        current = recorder.stream
        if asynchronous and own_stream is not None:
            self._wait(current, own_stream)
        builder = recorder.builder
        stream = own_stream if asynchronous and own_stream is not None else current
        builder.begin_op(state.op_name(func), reads=state.numbers(inputs), stream=stream)
        builder.op_writes(state.numbers(outputs) if form.kind != "send" else [])
        builder.op_work(
            flops=0,
            moved_bytes=sum(item.nbytes for item in (*inputs, *outputs)),
            operands=self.communicators.span(group),
        )
        self._name_buffers(form.kind, inputs, outputs)
        if not asynchronous:
            return finished(outputs)
        done = (lambda: None) if own_stream is None else (lambda: self._wait(own_stream, None))
        if batch is not None:
            batch.inputs += inputs
            batch.outputs += outputs
            batch.done = done
            return finished(outputs)
        return self.works.kept(RankWork(outputs, inputs, done, self.works.waited))

    def _wait(self, ahead: int, waits: int | None) -> None:
        """A stream, by default the current one, waits for what another has been given so far."""
        number = self.communicators.new_event()
        recorder = self.state.recorder
        recorder.mark(EventKind.EVENT_RECORD, stream=ahead, aux=number)
        stream = recorder.stream if waits is None else waits
        recorder.mark(EventKind.EVENT_WAIT, stream=stream, aux=number)

    def _name_buffers(
        self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Flat buffers exist for the sake of communication: those of FSDP, and DDP's buckets, which
        only C++ reduces."""
        buffers = inputs if kind == "reduce_scatter" else outputs if kind == "all_gather" else []
        if kind == "all_reduce" and self.state.in_engine():
            buffers = outputs
        for tensor in buffers:
            number = self.state.number_of(tensor)
            if number >= 0 and self.state.recorder.builder.role_of(number) == Role.UNKNOWN:
                self.state.recorder.builder.set_role(number, Role.COMMUNICATION)

    # Values

    def _known(self, tensor: torch.Tensor) -> Value:
        if isinstance(tensor, FakeTensor):
            return self.state.values.of(tensor)
        return tensor.detach()

    def _put(self, out: torch.Tensor, value: Value, inputs: list[torch.Tensor]) -> None:
        if not isinstance(out, FakeTensor):
            if value is not None and value.numel() == out.numel():
                out.detach().copy_(value.reshape(out.shape).clone())
            return
        values = self.state.values
        if value is None or value.numel() != out.numel():
            values.forget(out)
            if inputs and isinstance(inputs[0], FakeTensor):
                values.note_origin(out, values.origin(inputs[0]))
            return
        values.write(out, value.reshape(out.shape).to(out.dtype))


def _listed(item: Any) -> list[Any]:
    return [item] if isinstance(item, torch.Tensor) else list(item)


def _op_name(boxed: Any) -> str:
    """`SUM`, `AVG`, …"""
    op = boxed.op()
    return next((name for name in _REDUCTIONS if op == getattr(ReduceOp, name)), "PREMUL_SUM")
