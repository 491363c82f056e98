"""The host's RAM: lives of tensors that have no data here, page-locked memory, a real run."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from memplan.capturing.host.process import peak_resident_bytes
from memplan.estimation.host import PROCESS_BYTES, HostAnswer, host_memory
from memplan.simulate import AllocatorSettings
from memplan.types.trace import HostEventKind, Trace
from tests.capturing.jobs import record

MIB = 1 << 20
SIDE = 512
WEIGHT = SIDE * SIDE * 4  # 1 MiB
REAL_WIDTH = 2048
TOLERANCE = 32 * MIB
"""Of a real run: buffers of the CPU's matrix multiplication, and what is imported on the way."""


def host_rows(trace: Trace) -> list[tuple[int, int, bool]]:
    """(kind, bytes, pinned) of the storages' events."""
    host = trace.host
    rows = zip(host.kind.tolist(), host.bytes.tolist(), host.pinned.tolist(), strict=True)
    storages = (HostEventKind.ALLOC, HostEventKind.FREE)
    return [(kind, size, bool(pinned)) for kind, size, pinned in rows if kind in storages]


def live_peak(trace: Trace, *, pinned: bool | None = None) -> int:
    """Most bytes alive at once, of all storages or of one sort."""
    live = best = 0
    for kind, size, is_pinned in host_rows(trace):
        if pinned is None or is_pinned == pinned:
            live += size if kind == HostEventKind.ALLOC else -size
            best = max(best, live)
    return best


def answer(trace: Trace) -> HostAnswer:
    found = host_memory(trace, AllocatorSettings())
    assert found is not None
    return found


def linear() -> nn.Linear:
    return nn.Linear(SIDE, SIDE, bias=False)


def test_parameters_live_on_the_host_until_they_are_moved() -> None:
    def job() -> None:
        first, second = linear(), linear()
        first.cuda()
        average = copy.deepcopy(second)
        second.cuda()
        del average

    trace = record(job)
    # Two models, then the second and its copy; initialisation makes nothing that stays.
    assert live_peak(trace) == 2 * WEIGHT
    ended = sum(size for kind, size, _ in host_rows(trace) if kind == HostEventKind.FREE)
    begun = sum(size for kind, size, _ in host_rows(trace) if kind == HostEventKind.ALLOC)
    assert begun == ended == 3 * WEIGHT
    assert answer(trace).pinned == 0


def test_data_that_stay_count_once() -> None:
    """A checkpoint whose tensors become the parameters: the data are here as long as it is."""
    kept: list[torch.Tensor] = []

    def job() -> None:
        kept.append(torch.ones(SIDE, SIDE))
        model = linear()
        model.load_state_dict({"weight": kept[0]}, assign=True)
        torch.ones(SIDE, SIDE, device="cuda")
        assert live_peak_now() == 0
        kept.clear()
        torch.ones(SIDE, SIDE, device="cuda")

    def live_peak_now() -> int:
        return 0 if kept else WEIGHT

    trace = record(job)
    # The model's own parameter goes when the checkpoint's takes its place.
    assert live_peak(trace) == WEIGHT


def test_page_locked_memory() -> None:
    odd = 300 * 1000

    def job() -> None:
        buffer = torch.empty(odd, dtype=torch.uint8, pin_memory=True)
        batch = torch.zeros(odd, dtype=torch.uint8)
        assert buffer.is_pinned()
        assert not batch.is_pinned()
        batch = batch.pin_memory()
        assert batch.is_pinned()
        on_device = batch.to("cuda", non_blocking=True).random_()
        waited = on_device.to("cpu")
        assert not waited.is_pinned()
        back = on_device.to("cpu", non_blocking=True)
        assert back.is_pinned()

    trace = record(job)
    assert live_peak(trace, pinned=True) == 3 * odd
    assert live_peak(trace, pinned=False) == 0  # what is read back is here
    assert answer(trace).pinned == 3 * (1 << 19)


def test_page_locked_data_count_once() -> None:
    """Real data that are pinned are here too: resident, and in a row of their own."""
    size = 96 * MIB

    def job() -> None:
        buffer = torch.ones(size, dtype=torch.uint8).pin_memory()
        time.sleep(0.1)  # until the next sample
        buffer.cuda()

    found = answer(record(job))
    assert found.pinned == 128 * MIB
    assert found.breakdown.tensors == size
    assert found.breakdown.data < 32 * MIB


@pytest.mark.parametrize("maker", ["deepspeed.runtime.zero", "megatron.core.optimizer"])
def test_buffers_of_states_on_the_host_are_no_data(maker: str) -> None:
    """A package's host buffers for the model's states take no RAM here, and have their roles."""
    numbers = 64 * MIB
    source = "\n".join(
        (
            "import torch",
            "def offloaded(numbers):",
            "    weight = torch.empty(numbers, dtype=torch.bfloat16).pin_memory()",
            "    master = torch.nn.Parameter(weight.clone().float())",
            "    master.grad = torch.zeros(numbers).pin_memory()",
            "    torch.optim.Adam([master], foreach=False).step()",
        )
    )
    module = types.ModuleType(f"{maker}.made_up")
    exec(source, vars(module))
    before = peak_resident_bytes()
    trace = record(lambda: module.offloaded(numbers))
    assert peak_resident_bytes() - before < 2 * numbers
    found = answer(trace).breakdown
    assert found.parameters == found.gradients == 4 * numbers
    assert found.optimizer_state == 8 * numbers


def test_activations_saved_on_the_host() -> None:
    def job(*, pin_memory: bool) -> None:
        model = nn.Sequential(linear(), linear()).cuda()
        x = torch.ones(256, SIDE, device="cuda")
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            y = model(x).sum()
        y.backward()

    saved = 256 * SIDE * 4  # each layer's input, and its weight where that is needed
    for pin_memory in (False, True):
        trace = record(partial(job, pin_memory=pin_memory))
        packed = 2 * saved + WEIGHT
        assert live_peak(trace, pinned=pin_memory) == (packed if pin_memory else 2 * WEIGHT)
        host = host_rows(trace)
        copied = [size for kind, size, _ in host if kind == HostEventKind.ALLOC]
        assert sorted(copied) == sorted([WEIGHT, WEIGHT, saved, saved, WEIGHT])


def test_a_real_tensor_filled_from_the_device_counts_where_it_was_not_touched() -> None:
    size = 64 * MIB  # never from the heap

    def job(*, touched: bool) -> None:
        make = torch.zeros if touched else torch.empty
        store = make(size, dtype=torch.uint8)
        if touched:
            store.fill_(1)
        store.copy_(torch.ones(size, dtype=torch.uint8, device="cuda"))

    assert live_peak(record(lambda: job(touched=True))) == 0
    untouched = live_peak(record(lambda: job(touched=False)))
    assert size - MIB < untouched <= size


def test_roles_of_a_job_that_trains_on_the_host() -> None:
    """As with offloaded states: parameters, gradients and Adam's two states."""

    def job() -> None:
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        torch.ones(1, device="cuda")
        for _ in range(2):
            model(torch.ones(4, SIDE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    parts = answer(record(job)).breakdown
    assert parts.parameters == parts.gradients == WEIGHT
    assert 2 * WEIGHT <= parts.optimizer_state < 2 * WEIGHT + 1024


def real_job() -> None:
    """Builds, copies and trains a model on the host: 128 MiB of parameters."""
    layers = [nn.Linear(REAL_WIDTH, 2 * REAL_WIDTH, bias=False) for _ in range(4)]
    model = nn.ModuleList(layers)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        x = torch.randn(64, REAL_WIDTH)
        sum(layer(x).square().mean() for layer in layers).backward()
        optimizer.step()
        optimizer.zero_grad()
    del average


_MEASURE = """
import resource, torch
from tests.capturing.host.test_host import real_job
layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
layer(torch.ones(64, 64)).sum().backward()
optimizer.step()
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
real_job()
# Not ru_maxrss: that begins with what the process held that started this one.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024 - before)
"""


def test_against_a_real_run() -> None:
    root = Path(__file__).resolve().parents[3]
    # Freed blocks go back to the system at once, so that what is resident is what is alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        check=True,
    )
    measured = int(done.stdout)
    found = answer(record(real_job))
    tensors = found.peak - PROCESS_BYTES[1] - found.breakdown.data
    assert tensors >= 5 * 128 * MIB  # the model, its copy, gradients, two states
    assert abs(measured - tensors) < TOLERANCE
