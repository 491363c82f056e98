"""`linear` adds its bias into the product where PyTorch does; a capture does not change that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Provenance

WIDE, NARROW = 96, 40
SUM = 4 * 6 * 8 * WIDE
Job = Callable[[Tensor, Tensor, Tensor], object]


def _attention(x: Tensor, _weight: Tensor, _bias: Tensor) -> object:
    q = x.new_ones(6, 8, 12, NARROW).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        mask = x.new_zeros(12, WIDE)
        keys = x.new_ones(6, 8, WIDE, NARROW)
        return scaled_dot_product_attention(q, keys, keys, mask)


def _held(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    product = x @ weight.t()
    return product + bias, product


def _without_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    with torch.no_grad():
        return linear(x.transpose(0, 1), weight, bias)


class Another(TorchDispatchMode):
    """A mode of the job's own, which changes what PyTorch does without a capture too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def _inference(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    with torch.inference_mode():
        return linear(x.transpose(0, 1), weight, bias)


def _held_in_inference(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    with torch.inference_mode():
        product = x.transpose(0, 1) @ weight.t()
        return product + bias, product, (x.transpose(0, 1) @ weight.t()) + bias


def _in_a_mode(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    with Another():
        return linear(x.transpose(0, 1), weight, bias)


JOBS: dict[str, Job] = {
    "transposed": lambda x, w, b: linear(x.transpose(0, 1), w, b),
    "four dimensions": lambda x, w, b: linear(x.view(2, 3, 8, NARROW).transpose(1, 2), w, b),
    "contiguous": linear,
    "no bias": lambda x, w, b: linear(x.transpose(0, 1), w),
    "expression": lambda x, w, b: x.transpose(0, 1) @ w.t() + b,
    "function": lambda x, w, b: torch.add(x.transpose(0, 1) @ w.t(), b),
    "method": lambda x, w, b: (x.transpose(0, 1) @ w.t()).add(b),
    "held": _held,
    "no gradients": _without_gradients,
    "inference": _inference,
    "held in inference": _held_in_inference,
    "a mode of the job": _in_a_mode,
    "attention with a mask": _attention,
}


def _run(job: Job, device: str) -> Callable[[], object]:
    x = torch.ones(6, 8, NARROW, device=device)
    weight = torch.ones(WIDE, NARROW, device=device, requires_grad=True)
    bias = torch.ones(WIDE, device=device, requires_grad=True)
    return lambda: job(x, weight, bias)


def _real(job: Job) -> int:
    run = _run(job, "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = prof.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return sum(size in (SUM, 12 * SUM) for size in sizes)


def _captured(job: Job) -> int:
    with CaptureSession(CaptureOptions(profile=find_profile("a100-80gb"))) as session:
        run = _run(job, "cuda")
        start = len(session.state.recorder.builder)
        run()
        trace = session.trace()
    return sum(
        event.bytes in (SUM, 12 * SUM)
        for event in trace
        if event.index >= start
        and event.kind == EventKind.ALLOC
        and event.provenance == Provenance.OBSERVED
    )


@pytest.mark.parametrize("name", JOBS)
def test_a_capture_asks_for_as_many_sums_as_a_real_run(name: str) -> None:
    assert _captured(JOBS[name]) == _real(JOBS[name])
