"""What cannot be answered stops, and says which operator, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from memplan.types.errors import CaptureError
from tests.capturing.jobs import operators, record


def values() -> torch.Tensor:
    return torch.randn(8, 8, device="cuda")


def sparse_gradient() -> None:
    matrix = nn.Parameter(torch.eye(8).to_sparse().cuda())
    matrix.norm().backward()


def sparse_tensor() -> None:
    torch.eye(2, device="cuda").to_sparse_csr()


def sparse_tensor_of_the_host() -> None:
    torch.eye(2).to_sparse_csr().cuda()


def second_device() -> None:
    torch.ones(1, device="cuda:1")


def operator_without_a_rule() -> None:
    torch.ops.memplan_tests.opaque(values())


REFUSED: dict[str, tuple[Callable[[], None], str, str]] = {
    "sparse gradient": (sparse_gradient, "torch.sparse_coo", "sparse=False"),
    "sparse tensor": (sparse_tensor, "torch.sparse_csr", "sparse=False"),
    "sparse tensor of the host": (sparse_tensor_of_the_host, "torch.sparse_csr", "sparse=False"),
    "second device": (second_device, "cuda:1", "cuda:0"),
    "operator without a rule": (
        operator_without_a_rule,
        "memplan_tests.opaque.default",
        "torch.library.register_fake",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def operators_of_a_package() -> Iterator[None]:
    """One that exists on CUDA only, and one that the CPU has too; neither has a shape rule."""
    library = torch.library.Library("memplan_tests", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.define("on_both(Tensor x) -> Tensor")
    library.impl("on_both", lambda x: x.new_empty(x.shape[0], 3), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_says_what_where_and_what_to_do(name: str) -> None:
    job, what, hint = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        record(job)
    assert what in caught.value.message
    assert f"test_refusals.py:{job.__code__.co_firstlineno + 1}" in _lines(caught.value, job)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 4


def _lines(error: CaptureError, job: Callable[[], None]) -> str:
    """The message with any line of the job taken for its first."""
    first = job.__code__.co_firstlineno
    text = error.message
    for line in range(first + 1, first + 4):
        text = text.replace(f"py:{line}:", f"py:{first + 1}:")
    return text


def test_an_error_in_the_backward_pass_is_the_users_own() -> None:
    """Both from Python and from below an operator that the engine calls."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("the user's own")

    def job() -> None:
        Broken.apply(nn.Parameter(values())).sum().backward()

    with pytest.raises(ValueError, match="the user's own"):
        record(job)
    with pytest.raises(CaptureError):
        record(sparse_gradient)
    record(lambda: nn.Linear(8, 8).cuda()(values()).sum().backward())


def test_an_operator_without_a_rule_is_tried_on_the_host() -> None:
    def job() -> None:
        result = torch.ops.memplan_tests.on_both(values())
        assert result.shape == (8, 3)
        assert result.is_cuda

    trace = record(job)
    assert operators(trace)["on_both"] == 1
    assert [item.kind for item in trace.meta.assumptions] == ["shape"]


def test_torch_compile_is_the_eager_job_and_says_so() -> None:
    def job() -> None:
        model = torch.compile(nn.Linear(8, 8).cuda())
        model(values()).sum().backward()
        assert torch.compile(mode="max-autotune")(lambda x: x + 1)(values()).shape == (8, 8)

    trace = record(job)
    assert operators(trace)["addmm"] == 1
    assert [item.kind for item in trace.meta.assumptions] == ["compile"]
