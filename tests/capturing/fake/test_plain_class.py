"""A job's tensors are of PyTorch's own classes, for whoever asks for the exact type."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tests import warm
from tests.capturing.jobs import record


class OwnParameter(nn.Parameter):
    pass


class OwnTensor(torch.Tensor):
    pass


def test_exact_types() -> None:
    def job() -> None:
        layer = nn.Linear(8, 8)
        weight = layer.weight
        assert type(weight) is weight.__class__ is nn.Parameter
        layer.cuda()
        assert layer.weight is weight
        assert weight.is_cuda
        x = torch.randn(4, 8, device="cuda")
        loss = layer(x).sum()
        loss.backward()
        made = [x, x + 1, x[0], *x.chunk(2), x.cpu(), loss, weight.grad, weight.data]
        made += [weight.detach(), copy.deepcopy(x), torch.empty_like(weight), x.view(-1)]
        assert {type(tensor) for tensor in made} == {torch.Tensor}
        assert all(isinstance(tensor, FakeTensor) for tensor in (x, weight, loss))
        assert type(copy.deepcopy(weight)) is nn.Parameter
        assert not isinstance(torch.ones(2), FakeTensor)

    record(job, steps=0)


def test_a_parameter_is_made_by_its_type() -> None:
    """As `accelerate.utils.set_module_tensor_to_device` does."""

    def job() -> None:
        layer = nn.Linear(8, 8)
        for device in ("cpu", "cuda"):
            value = torch.randn(8, 8, device=device)
            cls: Any = type(layer.weight)
            layer.weight = cls(value, requires_grad=False)
            assert type(layer.weight) is nn.Parameter
            assert layer.weight.device.type == device
            assert not layer.weight.requires_grad
        optimizer_like = [p for p in layer.parameters() if type(p) is nn.Parameter]
        assert len(optimizer_like) == 2

    record(job, steps=0)


def test_accelerate_moves_a_tensor() -> None:
    utils = pytest.importorskip("accelerate.utils")

    def job() -> None:
        layer = nn.Linear(8, 8)
        value = torch.randn(8, 8)
        utils.set_module_tensor_to_device(layer, "weight", "cuda", value=value)
        assert type(layer.weight) is nn.Parameter
        assert layer.weight.is_cuda

    record(job, steps=0)


def test_classes_of_the_jobs_own() -> None:
    def job() -> None:
        own = OwnParameter(torch.randn(4, 4))
        assert type(own) is OwnParameter
        assert type(copy.deepcopy(own)) is OwnParameter
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        marked = (x * 2).as_subclass(OwnTensor)
        assert type(marked) is type(marked + 1) is OwnTensor
        marked.sum().backward()
        assert x.grad is not None
        made: Any = torch.Tensor._make_subclass(OwnTensor, x.detach(), False)
        assert type(made) is OwnTensor
        assert made.is_cuda

    record(job, steps=0)


def test_types_in_the_autograd_engine() -> None:
    seen: list[type] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(type(x))
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.extend((type(ctx.saved_tensors[0]), type(grads[0])))
            return grads[0] * 2

    def job() -> None:
        x = torch.randn(4, device="cuda", requires_grad=True)
        x.register_hook(lambda grad: seen.append(type(grad)))
        Double.apply(x).sum().backward()

    record(job, steps=0)
    assert seen == [torch.Tensor] * 4


def test_types_in_a_compiled_function() -> None:
    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor
        return x @ weight if type(weight) is nn.Parameter else x

    def job() -> None:
        weight = nn.Parameter(torch.randn(4, 4)).cuda()
        compiled = torch.compile(scaled, fullgraph=True)
        parameter = nn.Parameter(weight.detach())
        assert compiled(torch.randn(2, 4, device="cuda"), parameter).shape == (2, 4)

    trace = record(job, steps=0)
    assert "could not be compiled" not in str(trace.meta.assumptions)


def test_real_tensors_are_as_they_were() -> None:
    record(lambda: torch.ones(2, device="cuda"), steps=0)
    plain = torch.ones(2)
    own = plain.as_subclass(OwnTensor)
    python = torch._C.DispatchKey.Python
    assert not torch._C._dispatch_keys(own).has(python)
    for tensor in (plain, own):
        own_dispatch: Any = vars(torch._C)["_disabled_torch_dispatch_impl"]
        assert getattr(tensor, "__torch_dispatch__") is own_dispatch  # noqa: B009
        assert not hasattr(tensor, "fake_device")
        assert not hasattr(tensor, "item_memo")
    assert (own + 1).tolist() == [2.0, 2.0]


def test_a_tensor_that_outlives_its_capture_can_be_looked_at() -> None:
    kept: list[torch.Tensor] = []
    record(lambda: kept.append(torch.ones(3, device="cuda")), steps=0)
    assert isinstance(kept[0], FakeTensor)
    assert kept[0].device.type == "cuda"
    assert kept[0].shape == (3,)
    repr(kept[0])


def test_a_model_shared_between_processes() -> None:
    """On a card all tensors are, and `share_memory` does nothing."""

    def job() -> None:
        assert nn.Linear(2, 2).share_memory().cuda().share_memory().weight.is_shared()

    record(job)


def test_a_parameter_made_anew_with_what_another_keeps() -> None:
    """As Accelerate's `init_empty_weights` does; attributes of the script's own are refused."""
    kinds: list[object] = []

    def job() -> None:
        old: Any = torch.nn.Linear(64, 64).weight
        for device in ("cuda", "meta"):
            new = type(old)(old.to(device), **vars(old), requires_grad=False)
            kinds.append((type(new), new.device.type, new.requires_grad))
        old.mine = 1
        with pytest.raises(TypeError, match="mine"):
            type(old)(old.to("cuda"), **vars(old))

    record(job, steps=0)
    assert kinds == [
        (torch.nn.Parameter, "cuda", False),
        (torch.nn.Parameter, "meta", False),
    ]


def test_a_release_where_the_fake_device_is_a_plain_attribute(tmp_path: Path) -> None:
    """PyTorch 2.11: `FakeTensor.__new__` sets `fake_device`, and no property is behind that."""
    code = """
from torch._subclasses.fake_tensor import FakeTensor
del FakeTensor.fake_device
from memplan.capturing.trial import trial
found = trial()
assert found.ok, found.detail
"""
    done = warm.run(tmp_path, "-c", code, modules=warm.CAPTURE)
    assert done.returncode == 0, done.stderr


class Metadata:
    note = ""


class WithMetadata(Metadata, torch.Tensor):
    """As MONAI's MetaTensor: methods of its own, and another tensor's `__dict__` for its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, WithMetadata):
            made.__dict__ = {"note": "kept"}
        return made

    def new_empty(self, *_args: Any, **_options: Any) -> Any:
        raise AssertionError("a kernel knows nothing of the job's classes")


def test_a_subclass_with_metadata_and_methods_of_its_own() -> None:
    def job() -> None:
        layer = nn.Conv2d(1, 1, 3).cuda()
        x = torch.ones(2, 1, 8, 8).as_subclass(WithMetadata)
        for given in (x.to("cuda"), x.as_subclass(torch.Tensor).cuda().as_subclass(WithMetadata)):
            y = layer(given)
            assert type(given) is type(y) is WithMetadata
            assert y.is_cuda
            assert y.device == torch.device("cuda", 0)
            assert y.note == "kept"
            y.sum().backward()

    record(job)


class WithCopiedMetadata(torch.Tensor):
    """As fastai's TensorBase: a result has a copy of its operand's `__dict__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, WithCopiedMetadata) and isinstance(args[0], torch.Tensor):
            made.__dict__ = dict(vars(args[0]))
        return made


def test_a_real_tensor_with_the_metadata_of_one_on_the_device_is_real() -> None:
    def job() -> None:
        loss = torch.ones(2, device="cuda").as_subclass(WithCopiedMetadata).mean()
        for on_host in (loss.cpu(), loss.detach().to("cpu")):
            assert not (on_host * 64).is_cuda
            assert (on_host * 64).item() == 64.0
            assert (loss * 64).is_cuda

    record(job)


def test_a_parameter_takes_data_of_another_type() -> None:
    """As diffusers casts what it trains; also where gradients came before."""

    def job() -> None:
        layer = nn.Linear(8, 8).to("cuda", torch.float16)
        for trained in (torch.float32, torch.bfloat16):
            for parameter in layer.parameters():
                parameter.data = parameter.to(trained)
            layer.zero_grad()
            layer(torch.ones(2, 8, device="cuda", dtype=trained)).sum().backward()
            for parameter in layer.parameters():
                assert parameter.grad is not None
                assert parameter.dtype == parameter.grad.dtype == trained

    record(job)


class Scaled(torch.Tensor):
    """Numbers and their scale; it passes what it is asked on to the numbers, with its own types."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=torch.float32, device=numbers.device
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        numbers: Any = args[0].numbers
        return Scaled(numbers.__torch_dispatch__(func, types, [numbers, *args[1:]], kwargs))


def test_a_wrapper_passes_its_own_types_on() -> None:
    """As Transformer Engine's `Float8Tensor` does for a slice."""

    def job() -> None:
        half = Scaled(torch.empty(8, 4, dtype=torch.uint8, device="cuda"))[:4]
        assert type(half) is Scaled
        assert half.numbers.shape == (4, 4)

    record(job, steps=0)


AFTERWARDS = """
import gc, sys, types
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
import torch._dynamo  # else what PyTorch adds for it counts as ours

def attributes():
    return {owner: dict(vars(owner)) for owner in (torch.Tensor, FakeTensor)}

before, metaclass = attributes(), type(FakeTensor)
import memplan

def setup():
    import first_imported_here
    assert first_imported_here.is_available()
    model = nn.Linear(64, 64).cuda()
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

peaks = {memplan.estimate(step, setup=setup, gpu="rtx4090").peak_bytes for _ in range(2)}
assert len(peaks) == 1
kept = []
try:
    memplan.estimate(lambda *_: kept.append(torch.ones(3, device="cuda")) or 1 / 0, setup=setup)
except ZeroDivisionError:
    pass
gc.collect()
assert isinstance(kept[0], FakeTensor) and kept[0].device.type == "cuda"
kept.clear()
gc.collect()
assert attributes() == before
assert type(FakeTensor) is metaclass
with FakeTensorMode():
    assert isinstance(torch.ones(2), FakeTensor)

import first_imported_here as here
assert here.is_available is torch.cuda.is_available
assert here.made is torch.tensor
assert not here.is_available()
"""


def test_everything_is_as_before_once_nothing_fake_is_left(tmp_path: Path) -> None:
    """Also the names that a module took by `from … import` while a capture ran."""
    module = "from torch import tensor as made\nfrom torch.cuda import is_available\n"
    (tmp_path / "first_imported_here.py").write_text(module)
    (tmp_path / "job.py").write_text(AFTERWARDS)
    done = warm.run(tmp_path, "job.py", modules=warm.CAPTURE)
    assert done.returncode == 0, done.stderr
