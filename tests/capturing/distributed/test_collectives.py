"""What collectives leave behind: values, streams, communicators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from memplan.capturing.distributed.stores import LocalStore
from memplan.types.errors import CaptureError
from memplan.types.trace import EventKind
from tests.capturing.distributed.ranks import capture, join


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_values_are_those_of_equal_ranks(device: str) -> None:
    found: list[object] = []

    def job() -> None:
        join()
        three = torch.tensor([3.0], device=device)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            value = three.clone()
            dist.all_reduce(value, op=op)
            found.append(value.item())
        dist.broadcast(three, src=0)
        parts = [torch.zeros(1, device=device) for _ in range(4)]
        dist.all_gather(parts, three)
        found.append([part.item() for part in (three, *parts)])
        flat = torch.zeros(8, device=device)
        dist.all_gather_into_tensor(flat, torch.tensor([1.0, 2.0], device=device))
        found.append(flat.tolist())
        own = torch.zeros(2, device=device)
        dist.reduce_scatter_tensor(own, torch.arange(8.0, device=device))
        found.append(own.tolist())
        counts = torch.tensor([5, 6, 7, 8], device=device)
        theirs = torch.zeros_like(counts)
        dist.all_to_all_single(theirs, counts)
        found.append(theirs.tolist())

    capture(job, rank=2, size=4)
    assert found == [12.0, 3.0, 3.0, [3.0] * 5, [1.0, 2.0] * 4, [16.0, 20.0], [7, 7, 7, 7]]


def test_a_sparse_tensor_is_refused_as_nccl_does() -> None:
    def job() -> None:
        join()
        dist.all_reduce(torch.eye(2).to_sparse().cuda())

    with pytest.raises(CaptureError, match=r"sparse_coo .* c10d\.allreduce_\.default"):
        capture(job)


def test_objects() -> None:
    found: list[object] = []

    def job() -> None:
        join()
        everyones: list[object] = [None, None]
        dist.all_gather_object(everyones, {"loss": 1})
        mine = ["kept"]
        dist.broadcast_object_list(mine, src=0)
        out: list[object] = [None]
        dist.scatter_object_list(out, ["for 0", "for 1"], src=1)
        found.extend([everyones, mine, out])

    trace = capture(job, rank=1)
    assert found == [[{"loss": 1}] * 2, ["kept"], ["for 1"]]
    assert [item.kind for item in trace.meta.assumptions] == ["rank"]


def test_a_store_does_not_wait_for_other_ranks() -> None:
    def job() -> None:
        store = TCPStore("localhost", 1234, 2, is_master=False)
        assert isinstance(store, LocalStore)
        store.set("key", "value")
        assert store.get("key") == b"value"
        with pytest.raises(CaptureError, match="'other'"):
            store.get("other")

    capture(job)


def test_an_asynchronous_collective_keeps_its_inputs_until_it_is_waited_for() -> None:
    def job() -> None:
        join()
        gradient = torch.empty(1000, device="cuda")
        part = torch.empty(500, device="cuda")
        work = dist.reduce_scatter_tensor(part, gradient, async_op=True)
        del gradient
        torch.empty(10, device="cuda")
        work.wait()
        torch.empty(20, device="cuda")

    trace = capture(job)
    rows = [(event.kind, event.bytes, event.stream) for event in trace]
    own = next(stream for kind, _, stream in rows if kind == EventKind.EVENT_WAIT)
    assert own != 0
    freed = rows.index((EventKind.FREE, 4000, 0))
    waited = max(i for i, row in enumerate(rows) if row[0] == EventKind.EVENT_WAIT)
    assert rows[waited] == (EventKind.EVENT_WAIT, 0, 0)
    assert waited < freed < rows.index((EventKind.ALLOC, 80, 0))


@pytest.mark.parametrize("receive", [dist.irecv, dist.broadcast])
def test_a_handle_keeps_its_outputs_until_it_is_dropped(receive: Callable[..., Any]) -> None:
    def job() -> None:
        join()
        options = {} if receive is dist.irecv else {"async_op": True}
        received = torch.empty(1000, device="cuda")
        work = receive(received, 1, **options)
        del received
        work.wait()
        torch.empty(10, device="cuda")
        del work
        torch.empty(20, device="cuda")

    rows = [(event.kind, event.bytes) for event in capture(job)]
    freed = rows.index((EventKind.FREE, 4000))
    assert rows.index((EventKind.ALLOC, 40)) < freed < rows.index((EventKind.ALLOC, 80))


def test_the_handle_of_a_batch_keeps_nothing_that_was_waited_for() -> None:
    def job() -> None:
        join()
        received = torch.empty(1000, device="cuda")
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 1)])
        del received
        works[0].wait()
        torch.empty(10, device="cuda")

    rows = [(event.kind, event.bytes) for event in capture(job)]
    assert rows.index((EventKind.FREE, 4000)) < rows.index((EventKind.ALLOC, 40))


@pytest.mark.parametrize("worst", [False, True])
def test_a_check_of_what_the_ranks_have_passes(worst: bool) -> None:
    """As if the ranks were alike this one covers the beginning, and none the end."""

    def job() -> None:
        join()
        covered = torch.tensor([True, False], device="cuda").int()
        dist.all_reduce(covered, op=dist.ReduceOp.MAX)
        ends = covered.bool() if worst else covered
        assert torch.all(ends)
        if not ends.all():
            raise AssertionError
        assert not bool(ends.all())  # not a check alone: what is known

    texts = [item.text for item in capture(job).meta.assumptions]
    assert "a check passes that compares what the ranks have" in texts


def test_communicators_are_made_at_the_first_collective_or_with_their_device() -> None:
    def job() -> None:
        join()
        dist.new_group([0, 1, 2, 3])  # never used
        pair = dist.new_group([0, 4], group_desc="pair")
        hosts = dist.new_group(backend="gloo")
        tensor = torch.ones(4, device="cuda")
        dist.all_reduce(tensor)
        dist.broadcast(tensor, src=0, group=pair)
        dist.all_reduce(torch.ones(1), group=hosts)
        dist.send(tensor, dst=1)

    made = capture(job, rank=0, size=8, local=4).meta.communicators
    assert [(c.ranks, c.local_ranks, c.nodes, c.eager, c.collectives) for c in made] == [
        (8, 4, 2, False, ["all_reduce"]),
        (2, 1, 2, False, ["broadcast"]),
        (2, 2, 1, False, ["send"]),
    ]

    def eager() -> None:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))

    assert [(c.eager, c.collectives) for c in capture(eager).meta.communicators] == [(True, [])]


def test_a_batch_of_sends_goes_over_the_groups_communicator() -> None:
    def job() -> None:
        join()
        own, others = torch.ones(1000, device="cuda"), torch.empty(2000, device="cuda")
        ops = [dist.P2POp(dist.isend, own, 1), dist.P2POp(dist.irecv, others, 3)]
        works = dist.batch_isend_irecv(ops)
        assert len(works) == 1, "NCCL gives one handle for all"
        del own, ops
        torch.empty(10, device="cuda")
        works[0].wait()
        torch.empty(20, device="cuda")
        hosts = dist.new_group(backend="gloo")
        pair = [
            dist.P2POp(dist.isend, torch.ones(1), 1, hosts),
            dist.P2POp(dist.irecv, torch.ones(1), 1, hosts),
        ]
        assert len(dist.batch_isend_irecv(pair)) == 2, "gloo one for each"

    trace = capture(job, rank=0, size=4)
    (made,) = trace.meta.communicators
    assert (made.ranks, made.peers, made.collectives) == (4, 2, ["send", "recv"])
    rows = [(event.kind, event.bytes, event.stream) for event in trace]
    waited = max(i for i, row in enumerate(rows) if row[0] == EventKind.EVENT_WAIT)
    assert waited < rows.index((EventKind.FREE, 4000, 0)) < rows.index((EventKind.ALLOC, 80, 0))
