"""After a capture the process is as before, and another capture finds the same."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import Trace
from tests.capturing.jobs import record

PATCHED = [
    (torch.cuda, name)
    for name in ("is_available", "device_count", "Stream", "Event", "memory_stats", "synchronize")
] + [
    (torch, "compile"),
    (torch, "Generator"),
    (torch, "Stream"),
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "_apply"),
    (torch.nn.Parameter, "__new__"),
    (torch.Tensor, "pin_memory"),
    (torch.Tensor, "record_stream"),
    (torch.UntypedStorage, "data_ptr"),
    (torch.utils, "swap_tensors"),
    (threading.Thread, "run"),
    (torch.version, "cuda"),
    (torch.Tensor, "data"),
    (torch.Tensor, "tolist"),
    (torch.Tensor, "data_ptr"),
    (torch.Tensor, "as_subclass"),
]


def job() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    side = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(side):
            x = torch.randn(8, 16, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def state() -> list[object]:
    patched = [getattr(owner, name, None) for owner, name in PATCHED]
    return [*patched, len(_get_current_dispatch_mode_stack()), torch.get_default_device()]


def assert_real_work_works() -> None:
    assert not torch.cuda.is_available()
    weight = nn.Parameter(torch.zeros(3, 3))
    assert type(weight) is nn.Parameter
    model = nn.LSTM(3, 5)
    model(torch.ones(2, 4, 3))[0].sum().backward()
    assert type(model.weight_ih_l0.grad) is torch.Tensor
    assert model.weight_ih_l0.grad.abs().sum().item() > 0
    seen: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(2)))
    thread.start()
    thread.join()
    assert seen[0].tolist() == [1.0, 1.0]
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()


def test_the_process_is_as_before() -> None:
    before = state()
    record(job)
    assert state() == before
    assert_real_work_works()


def test_also_after_a_failure() -> None:
    before = state()

    def failing() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            nn.Linear(3, 3).cuda()(torch.ones(2, 3, device="cuda")).sum().backward()
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        record(failing)
    assert state() == before
    assert_real_work_works()


def test_two_captures_are_alike() -> None:
    first, second = record(job), record(job)
    assert comparable(first) == comparable(second)


def comparable(trace: Trace) -> list[object]:
    columns = [getattr(trace.events, name) for name in ("kind", "storage", "bytes", "stream")]
    columns += [trace.events.phase, trace.events.step, trace.ops.reads, trace.ops.writes]
    return [*(np.asarray(column).tolist() for column in columns), trace.meta.assumptions]


def test_only_one_capture_at_a_time() -> None:
    options = CaptureOptions(profile=find_profile("a100-80gb"))
    with CaptureSession(options), pytest.raises(RuntimeError, match="already running"):
        CaptureSession(options).__enter__()
    assert_real_work_works()


def test_tensors_that_outlive_a_capture_are_harmless() -> None:
    kept: list[torch.Tensor] = []
    record(lambda: kept.append(torch.ones(3, device="cuda")))
    kept.clear()
    assert_real_work_works()
