"""`torch.cuda.FloatTensor` and its kind, as scripts from before `dtype` and `device` use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.capturing.jobs import record


def test_types_of_cuda_make_and_convert_tensors() -> None:
    def job() -> None:
        cuda: Any = torch.cuda  # mypy knows but one of the types
        kind = cuda.FloatTensor
        for made in (kind(2, 3), kind(np.ones((2, 3))), kind(torch.ones(2, 3).tolist())):
            assert made.type() == "torch.cuda.FloatTensor"
            assert made.shape == (2, 3)
            assert isinstance(made, kind)
        for name in (kind, "torch.cuda.FloatTensor"):
            assert torch.arange(4).type(name).type() == "torch.cuda.FloatTensor"
        assert not isinstance(cuda.LongTensor([1, 2]), kind)
        assert cuda.LongTensor([1, 2]).tolist() == [1, 2]
        assert kind.dtype is torch.float32

    record(job)


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_type_of_cuda_as_the_default() -> None:
    def job() -> None:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert torch.zeros(2).is_cuda
        assert torch.Tensor([1.0]).expand(3).is_cuda
        assert torch.nn.Linear(2, 2).weight.is_cuda
        assert not torch.FloatTensor([1.0]).is_cuda
        torch.set_default_tensor_type("torch.FloatTensor")
        assert not torch.zeros(2).is_cuda
        assert not torch.Tensor(2).is_cuda

    record(job)
    assert torch.Tensor([1.0]).tolist() == [1.0]
