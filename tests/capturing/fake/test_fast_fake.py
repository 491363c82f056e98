"""The remembered shape rules give exactly what PyTorch's fake mode gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.capturing.fake.fast_fake import FastFakeMode

aten = torch.ops.aten
Case = Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def plain_mode() -> FakeTensorMode:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def fast_mode() -> FastFakeMode:
    return FastFakeMode(allow_non_fake_inputs=True)


def flat(items: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for item in items.values() if isinstance(items, dict) else items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple, dict)):
            found.extend(flat(item))
    return found


def described(result: Any, inputs: list[torch.Tensor]) -> Any:
    """All that can be told of a result, with storages named by the input that has them."""
    if isinstance(result, (list, tuple)):
        return type(result), [described(item, inputs) for item in result]
    if not isinstance(result, torch.Tensor):
        return type(result), result
    storage = result.untyped_storage()
    own = [i for i, tensor in enumerate(inputs) if tensor is result]
    shared = [
        i for i, tensor in enumerate(inputs) if tensor.untyped_storage()._cdata == storage._cdata
    ]
    return (
        type(result),
        tuple(result.shape),
        result.stride(),
        result.storage_offset(),
        result.dtype,
        result.device,
        result.layout,
        result.requires_grad,
        result.is_inference(),
        storage.nbytes(),
        torch._C._dispatch_key_set(result),
        sorted(name for name, value in vars(result).items() if value is not None),
        own,
        shared,
    )


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def call(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return func, args, kwargs


CASES: dict[str, Case] = {
    "add": lambda: call(aten.add.Tensor, t(4, 5), t(5)),
    "add alpha": lambda: call(aten.add.Tensor, t(4, 5), t(5), alpha=2),
    "add itself": lambda: call(aten.add_.Tensor, *[t(3)] * 2),
    "promotion": lambda: call(aten.mul.Tensor, t(4, dtype=torch.int64), 2.5),
    "transposed": lambda: call(aten.relu.default, t(4, 5).t()),
    "expanded": lambda: call(aten.neg.default, t(4, 1).expand(4, 6)),
    "channels last": lambda: call(
        aten.relu.default, t(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "offset": lambda: call(aten.clone.default, t(10, 10)[3:5, 2:]),
    "mm": lambda: call(aten.mm.default, t(4, 5), t(5, 6)),
    "conv": lambda: call(
        aten.convolution.default,
        t(2, 3, 8, 8),
        t(4, 3, 3, 3),
        t(4),
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    "conv backward": lambda: call(
        aten.convolution_backward.default,
        t(2, 4, 8, 8),
        t(2, 3, 8, 8),
        t(4, 3, 3, 3),
        [4],
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
        [False, True, True],
    ),
    "batch norm": lambda: call(
        aten.native_batch_norm.default, t(2, 3, 4), t(3), t(3), t(3), t(3), True, 0.1, 1e-5
    ),
    "layer norm": lambda: call(aten.native_layer_norm.default, t(2, 8), [8], t(8), None, 1e-5),
    "dropout": lambda: call(aten.native_dropout.default, t(4, 5), 0.1, True),
    "max": lambda: call(aten.max.dim, t(4, 5), 1),
    "topk": lambda: call(aten.topk.default, t(4, 50), 3),
    "sum": lambda: call(aten.sum.dim_IntList, t(4, 5), [1], True),
    "cat": lambda: call(aten.cat.default, [t(2, 3), t(4, 3)]),
    "index": lambda: call(aten.index.Tensor, t(4, 5), [None, t(3, dtype=torch.int64)]),
    "index_put_": lambda: call(
        aten.index_put_.default, t(4, 5), [t(3, dtype=torch.int64)], t(3, 5), True
    ),
    "embedding": lambda: call(aten.embedding.default, t(10, 4), t(2, 3, dtype=torch.int64)),
    "to half": lambda: call(aten._to_copy.default, t(4), dtype=torch.float16),
    "view": lambda: call(aten.view.default, t(4, 6), [2, 12]),
    "slice": lambda: call(aten.slice.Tensor, t(10, 6), 0, 2, 8, 3),
    "select": lambda: call(aten.select.int, t(4, 6), 1, 5),
    "transpose": lambda: call(aten.transpose.int, t(4, 6, 2), 0, 2),
    "expand": lambda: call(aten.expand.default, t(4, 1), [4, 7]),
    "as_strided": lambda: call(aten.as_strided.default, t(20), [3, 3], [2, 1], 4),
    "detach": lambda: call(aten.detach.default, t(4)),
    "alias of part": lambda: call(aten.alias.default, t(10)[3:]),
    "unsafe view": lambda: call(aten._unsafe_view.default, t(4, 6), [24]),
    "split": lambda: call(aten.split.Tensor, t(10, 3), 4),
    "unbind": lambda: call(aten.unbind.int, t(3, 4)),
    "view as real": lambda: call(aten.view_as_real.default, t(3, dtype=torch.complex64)),
    "view dtype": lambda: call(aten.view.dtype, t(4, 6), torch.int16),
    "empty view": lambda: call(aten.slice.Tensor, t(10, 6), 0, 10, 10),
    "complex": lambda: call(aten.mul.Tensor, t(3, dtype=torch.complex64), 2),
    "mul_": lambda: call(aten.mul_.Tensor, t(4, 5), t(5)),
    "copy_": lambda: call(aten.copy_.default, t(4, 5), t(5, dtype=torch.float64)),
    "zero_": lambda: call(aten.zero_.default, t(4, 5)[1:]),
    "normal_": lambda: call(aten.normal_.default, t(4, 5), 0.0, 0.02),
    "transpose_": lambda: call(aten.transpose_.default, t(4, 5), 0, 1),
    "unsqueeze_": lambda: call(aten.unsqueeze_.default, t(4, 5), 0),
    "resize_": lambda: call(aten.resize_.default, t(4), [100]),
    "set_": lambda: call(aten.set_.source_Tensor, t(4), t(8, 2)),
    "out": lambda: call(aten.add.out, t(4), t(4), out=t(0)),
    "foreach add": lambda: call(aten._foreach_add.Scalar, [t(4), t(2, 3)], 1.5),
    "foreach mul_": lambda: call(aten._foreach_mul_.Scalar, [t(4), t(2, 3)], 1.5),
    "foreach sqrt": lambda: call(aten._foreach_sqrt.default, [t(4).double(), t(2, 3)]),
    "foreach addcdiv_": lambda: call(
        aten._foreach_addcdiv_.ScalarList, [t(4)], [t(4)], [t(4)], [0.1]
    ),
    "arange": lambda: call(aten.arange.start_step, 0, 7, 2, device=torch.device("cpu")),
    "empty": lambda: call(aten.empty.memory_format, [3, 4], device=torch.device("cpu")),
    "empty strided": lambda: call(
        aten.empty_strided.default, [3, 4], [1, 5], device=torch.device("cpu")
    ),
    "full like": lambda: call(aten.full_like.default, t(3, 4).t(), 1, dtype=torch.bool),
    "scalar tensor": lambda: call(
        aten.scalar_tensor.default, 1.0, dtype=torch.float16, device=torch.device("cpu")
    ),
    "where": lambda: call(aten.where.self, t(4, 1, dtype=torch.bool), t(5), t()),
    "flash": lambda: call(
        aten._scaled_dot_product_flash_attention_for_cpu.default, *[t(2, 4, 16, 8)] * 3
    ),
}


def run(mode: FakeTensorMode, case: Case) -> Any:
    """Description of a case's result and of its arguments afterwards; or the error's type."""
    with mode:
        func, args, kwargs = case()
    inputs = flat(args) + flat(kwargs)
    try:
        result = mode.dispatch(func, (), args, kwargs)
    except Exception as error:
        return type(error)
    return described(result, inputs), [described(tensor, inputs) for tensor in inputs]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_operators_give_the_same_at_first_and_again(name: str, inference: bool) -> None:
    fast = fast_mode()
    with torch.inference_mode(inference):
        expected = run(plain_mode(), CASES[name])
        for _ in range(3):
            assert run(fast, CASES[name]) == expected
    assert not isinstance(expected, type), "a case that PyTorch runs"


@pytest.mark.parametrize("name", ["add", "mm", "view", "split", "mul_", "conv", "empty", "flash"])
def test_operators_are_remembered(name: str) -> None:
    fast = fast_mode()
    for _ in range(4):
        run(fast, CASES[name])
    before = fast.hits
    run(fast, CASES[name])
    assert fast.hits > before


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (lambda: call(aten.mm.default, t(4, 5), t(4, 5)), RuntimeError),
        (lambda: call(aten.view.default, t(4, 5), [7]), RuntimeError),
        (lambda: call(aten._local_scalar_dense.default, t()), DataDependentOutputException),
        (lambda: call(aten.nonzero.default, t(4)), DynamicOutputShapeException),
        (
            lambda: call(aten.index.Tensor, t(4), [t(4, dtype=torch.bool)]),
            DynamicOutputShapeException,
        ),
    ],
)
def test_errors_are_the_same_each_time(case: Case, error: type[Exception]) -> None:
    fast = fast_mode()
    expected = run(plain_mode(), case)
    assert issubclass(expected, error)
    for _ in range(3):
        assert run(fast, case) is expected


def test_types_of_numbers_and_the_default_dtype_are_told_apart() -> None:
    fast = fast_mode()
    numbers: list[Any] = [1, 1.0, True, 1]
    with fast:
        x = t(4, dtype=torch.int64)
        kinds = [fast.dispatch(aten.mul.Tensor, (), (x, number)).dtype for number in numbers]
        torch.set_default_dtype(torch.float64)
        try:
            wide = fast.dispatch(aten.mul.Tensor, (), (x, 1.0)).dtype
        finally:
            torch.set_default_dtype(torch.float32)
    assert kinds == [torch.int64, torch.float32, torch.int64, torch.int64]
    assert wide == torch.float64


def test_inference_mode_is_told_apart() -> None:
    fast = fast_mode()
    with fast:
        x = t(4)
    found = []
    for inference in (False, True, False, True):
        with torch.inference_mode(inference):
            found.append(fast.dispatch(aten.relu.default, (), (x,)).is_inference())
    assert found == [False, True, False, True]


def test_step_sizes_of_optimizers_need_no_new_plan() -> None:
    fast = fast_mode()
    with fast:
        group = [t(4), t(2, 3)]
    fast.dispatch(aten._foreach_mul_.Scalar, (), (group, 0.5))
    before = fast.hits
    for step in range(5):
        fast.dispatch(aten._foreach_mul_.Scalar, (), (group, 0.1 * step))
    assert fast.hits == before + 5


def test_a_buffer_that_is_filled_row_by_row_needs_no_new_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = fast_mode()
    ran: list[str] = []
    rule = FakeTensorMode.dispatch

    def counted(mode: Any, func: Any, *rest: Any) -> Any:
        ran.append(func.name())
        return rule(mode, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    with fast:
        buffer, row = t(50, 4), t(4)
    ran.clear()
    seen = []
    for step in range(1, 20):
        place: Any = fast.dispatch(aten.select.int, (), (buffer, 0, step))
        part: Any = fast.dispatch(aten.slice.Tensor, (), (place, 0, step % 3, 3))
        fast.dispatch(aten.copy_.default, (), (place, row))
        fast.dispatch(aten.fill_.Scalar, (), (part, 0.5 + step))
        seen.append((place.storage_offset(), part.storage_offset(), tuple(part.shape)))
    assert seen == [(4 * i, 4 * i + i % 3, (3 - i % 3,)) for i in range(1, 20)]
    # Views once more: that they are some is seen first. A part has one of three shapes.
    counts = [ran.count(name) for name in ("aten::select.int", "aten::slice.Tensor")]
    assert counts == [2, 2]
    assert [ran.count(name) for name in ("aten::copy_", "aten::fill_.Scalar")] == [1, 3]


def test_a_view_outside_its_tensor_is_the_same_error_each_time() -> None:
    fast = fast_mode()
    with fast:
        x = t(4, 5)
    for index in (0, 1, 2):
        fast.dispatch(aten.select.int, (), (x, 0, index))
    for _ in range(2):
        with pytest.raises(IndexError, match="out of range"):
            fast.dispatch(aten.select.int, (), (x, 0, 4))


@pytest.mark.parametrize("shape", [[2, 5], [5, 2]])
def test_a_view_never_enlarges_a_storage(shape: list[int]) -> None:
    sizes = []
    for mode in (plain_mode(), fast_mode()):
        with mode:
            kept, emptied = t(10), t(10)
        for _ in range(3):
            mode.dispatch(aten.view.default, (), (kept, [2, 5]))
        emptied.untyped_storage().resize_(0)
        view: Any = mode.dispatch(aten.view.default, (), (emptied, shape))
        sizes.append((emptied.untyped_storage().nbytes(), tuple(view.shape)))
    assert sizes[0] == sizes[1] == (0, tuple(shape))


def test_tensors_of_another_mode_and_constants_are_left_to_pytorch() -> None:
    fast, other = fast_mode(), plain_mode()
    with other:
        stranger = t(4)
    for _ in range(3):
        fast.dispatch(aten.relu.default, (), (stranger,))
    assert fast.hits == 0
    for value in (3.0, 4.0, 5.0):
        with fast:
            constant = torch.tensor(value)
            assert (constant * 2).item() == 2 * value


class Log(TorchDispatchMode):
    """What every operator of a program gave."""

    def __init__(self, inner: FakeTensorMode) -> None:
        super().__init__()
        self.inner = inner
        self.rows: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = flat(args) + flat(kwargs)
        result = self.inner.dispatch(func, types, args, kwargs)
        if any(isinstance(item, FakeTensor) for item in [*inputs, *flat([result])]):
            self.rows.append((str(func), described(result, inputs)))
        return result


def small_transformer() -> tuple[nn.Module, tuple[int, ...]]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Linear(8, 32), layer, layer, nn.Linear(32, 8)), (2, 6, 8)


def small_resnet() -> tuple[nn.Module, tuple[int, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    )
    return model, (4, 3, 16, 16)


@pytest.mark.parametrize("make", [small_transformer, small_resnet])
@pytest.mark.parametrize("foreach", [False, True])
def test_training_gives_the_same_tensors_operator_by_operator(
    make: Callable[[], tuple[nn.Module, tuple[int, ...]]], foreach: bool
) -> None:
    logs = []
    for mode in (plain_mode(), fast_mode()):
        with Log(mode) as log:
            model, shape = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.empty(shape)).float().square().mean().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                model(torch.empty(shape))
        logs.append(log.rows)
    assert len(logs[0]) > 300
    assert logs[0] == logs[1]


OPERATORS: list[Callable[[torch.Tensor, random.Random], torch.Tensor]] = [
    lambda x, r: x.t(),
    lambda x, r: x[: r.randint(1, x.shape[0])],
    lambda x, r: x[:, r.randint(0, x.shape[1] - 1) :],
    lambda x, r: x.reshape(-1).view(x.shape[1], x.shape[0]),
    lambda x, r: x.contiguous(),
    lambda x, r: x + r.choice([1, 2.0, True]),
    lambda x, r: x.mul_(r.choice([2, 3])),
    lambda x, r: x.to(r.choice([torch.float16, torch.float32, torch.int32])),
    lambda x, r: x.unsqueeze(0).expand(3, *x.shape)[1],
    lambda x, r: torch.cat([x, x]),
    lambda x, r: x.sum(0, keepdim=True) * x,
    lambda x, r: x.clone().transpose_(0, 1),
    lambda x, r: x.split(max(1, x.shape[0] // 2))[-1],
    lambda x, r: x.detach().zero_(),
    lambda x, r: torch.empty_like(x).copy_(x),
]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_the_same_tensors(seed: int) -> None:
    logs = []
    for mode in (plain_mode(), fast_mode()):
        chance = random.Random(seed)
        with Log(mode) as log:
            x = torch.empty(6, 4)
            for _ in range(40):
                x = chance.choice(OPERATORS)(x, chance)
                if x.numel() > 500:
                    x = torch.empty(6, 4)
        logs.append(log.rows)
    assert logs[0] == logs[1]
