"""What scripts nobody here wrote do, and small programs of our own did not."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.data import DataLoader, TensorDataset

from memplan.capturing.training import ending
from memplan.types.errors import CaptureError
from memplan.types.trace import Role
from tests import warm
from tests.capturing.jobs import bytes_of, record


def test_lists_of_device_scalars_become_tensors() -> None:
    """As torchtune scales the frequencies of its rotary embedding."""
    seen: list[Any] = []

    def job() -> None:
        values = torch.arange(4, device="cuda").float()
        for make in (torch.tensor, torch.as_tensor, torch.asarray):
            made = make([value * 2 for value in values], device="cuda")
            seen.append((made.device.type, made.tolist()))
        nested = [[values[0], 7.0], [values[1], values[2]]]
        seen.append(("cuda", values.new_tensor(nested).tolist()))
        parameter = torch.nn.Parameter(torch.zeros(2))
        seen.append(("cpu", torch.tensor([parameter[0].detach(), 1.0]).tolist()))

    record(job, steps=0)
    doubled = ("cuda", [0.0, 2.0, 4.0, 6.0])
    assert seen == [
        doubled,
        doubled,
        doubled,
        ("cuda", [[0.0, 7.0], [1.0, 2.0]]),
        ("cpu", [0.0, 1.0]),
    ]


def test_a_list_that_no_tensor_can_hold_still_fails() -> None:
    def job() -> None:
        with pytest.raises(ValueError, match="expected sequence of length"):
            torch.tensor([[1, 2], [3]])
        with pytest.raises(RuntimeError, match="Could not infer dtype"):
            torch.tensor([object()])

    record(job, steps=0)


def test_the_default_device_of_the_script_does_not_move_known_values() -> None:
    seen: list[float] = []

    def job() -> None:
        with torch.device("cuda"):
            values = torch.arange(8).float() / 8
            total = torch.tensor(0.0)
            for value in values:
                total = total + value
            seen.append(total.item())
            seen.append(float((values > 0.5).nonzero().numel()))
            assert torch.tensor([1.0]).device.type == "cuda"

    record(job, steps=0)
    assert seen == [3.5, 3.0]


def test_nccl_is_there() -> None:
    """Scripts of one process ask too, before they take bf16."""

    def job() -> None:
        assert torch.distributed.is_nccl_available()
        assert torch.cuda.nccl.version() >= (2, 10)

    before = torch.distributed.is_nccl_available
    record(job, steps=0)
    assert torch.distributed.is_nccl_available is before


class Halves(torch.Tensor):
    """A tensor kept as two others, as quantised weights are."""

    data_: torch.Tensor
    scale: torch.Tensor

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(
            cls, (data.shape[0], data.shape[1] * 2), dtype=torch.bfloat16, device=data.device
        )
        made.data_, made.scale = data, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            held = args[0]
            made = cls(func(held.data_), func(held.scale))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is torch.ops.aten.copy_.default:
            args[0].data_.copy_(args[1].to(args[0].device)[:, ::2])
            return args[0]
        raise NotImplementedError(func)

    def dense(self) -> torch.Tensor:
        return torch.cat([self.data_, self.data_], 1).to(torch.bfloat16) * self.scale


def test_quantised_weights_are_parameters() -> None:
    """Swapped into a linear layer, loaded from a checkpoint, used: as torchtune's QLoRA does."""

    def job() -> None:
        layer = torch.nn.Linear(1024, 512, bias=False, device="cuda", dtype=torch.bfloat16)
        layer.weight.requires_grad_(False)
        data = torch.zeros(512, 512, dtype=torch.uint8, device="cuda")
        halves = Halves(data, torch.ones(512, 1, dtype=torch.bfloat16, device="cuda"))
        torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(halves, requires_grad=False))
        del data, halves
        layer.load_state_dict({"weight": torch.zeros(512, 1024, dtype=torch.bfloat16)})
        adapter = torch.nn.Linear(512, 4, bias=False, device="cuda", dtype=torch.bfloat16)
        optimizer = torch.optim.SGD([*layer.parameters(), *adapter.parameters()], lr=0.1)
        for _ in range(3):
            inputs = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
            assert isinstance(layer.weight, Halves)
            adapter(inputs @ layer.weight.dense().t()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    assert bytes_of(trace, Role.PARAMETER) >= 512 * 512 + 512 * 2 + 512 * 4 * 2
    live = max(event.bytes for event in trace if event.op.startswith("aten.cat"))
    assert live == 512 * 1024


def test_weights_read_back_stay_fake() -> None:
    """Merging adapters for a checkpoint must not multiply matrices on the host."""

    def job() -> None:
        weight = torch.randn(1000, 1000, device="cuda").cpu()
        assert isinstance(weight, FakeTensor)
        assert weight.numpy().shape == np.array(weight, copy=True).shape == (1000, 1000)
        scores = torch.randn(100, 100, device="cuda").cpu()
        assert type(scores) is torch.Tensor

    record(job, steps=0)


def test_the_host_has_a_time_limit_after_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_SECONDS_AFTER", 0.2)
    rounds = 0

    def job() -> None:
        nonlocal rounds
        model = torch.nn.Linear(4, 4, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for (batch,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2):
            model(batch.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        host = torch.zeros(4)
        for rounds in range(100):  # noqa: B007
            time.sleep(0.05)
            host += 1

    record(job)
    assert 0 < rounds < 50


def test_an_error_in_a_package_says_where(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from memplan.capturing.options import CaptureOptions, ScriptTarget
    from memplan.capturing.script import capture_script
    from memplan.types.device import find_profile

    package = tmp_path / "site-packages" / "elsewhere"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import torch\ntorch.zeros(1, device='cuda')\nraise ValueError('no\\n\\n' + 'x' * 9999)\n"
    )
    target = ScriptTarget("script", str(package / "train.py"))
    with pytest.raises(CaptureError) as caught:
        capture_script(target, CaptureOptions(profile=find_profile("h100")))
    assert str(caught.value).startswith("elsewhere/train.py:3: the script raised ValueError: no")
    assert len(str(caught.value)) < 500


def test_regions_that_torchvision_pools(tmp_path: Path) -> None:
    """In a process of its own: torchvision was imported here outside a capture."""
    pytest.importorskip("torchvision")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torchvision.ops import roi_align\n"
        "x = torch.randn(2, 8, 32, 32, device='cuda', requires_grad=True)\n"
        "boxes = torch.tensor([[0.0, 0, 0, 9, 9], [1, 2, 2, 8, 8]], device='cuda')\n"
        "roi_align(x, boxes, 5).sum().backward()\n"
        "print(x.grad.shape)\n"
    )
    done = warm.memplan(tmp_path, "estimate", "--gpu", "24GiB", "train.py")
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 8, 32, 32])" in done.stderr


def test_boxes_that_torchvision_keeps() -> None:
    """Without its operators, as beside a CPU build of PyTorch where its wheel is built for CUDA."""
    boxes = pytest.importorskip("torchvision.ops.boxes")
    kept: list[int] = []

    def job() -> None:
        found = torch.rand(1000, 4, device="cuda")
        kept.append(len(found[boxes.nms(found, found[:, 0], 0.5)]))
        kept.append(len(boxes.batched_nms(found, found[:, 0], found[:, 1].long(), 0.5)))
        torch.jit.script(boxes.nms)  # effdet's labels call it from TorchScript

    trace = record(job, steps=0)
    assert kept == [500, 500]
    a_bit_for_each_pair = 1000 * 16 * 8
    assert (trace.events.bytes == a_bit_for_each_pair).sum() == 2 * 2


def test_torchaudio_does_without_operators_that_cannot_be_loaded(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a CPU build of PyTorch, where its wheel is built for CUDA."""
    extension = tmp_path / "torchaudio" / "_extension"
    extension.mkdir(parents=True)
    (extension / "_torchaudio.so").write_bytes(b"no library")
    (extension / "utils.py").write_text(
        "import torch\nfrom pathlib import Path\n"
        "def _load_lib(lib):\n"
        "    torch.ops.load_library(Path(__file__).parent / f'{lib}.so')\n"
        "    return True\n",
        encoding="utf-8",
    )
    (extension / "__init__.py").write_text(
        "from .utils import _load_lib\nthere = _load_lib('_torchaudio')\n", encoding="utf-8"
    )
    (tmp_path / "torchaudio" / "__init__.py").write_text(
        "from . import _extension\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torchaudio", "torchaudio._extension", "torchaudio._extension.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found: list[bool] = []

    def job() -> None:
        found.append(importlib.import_module("torchaudio")._extension.there)

    record(job, steps=0)
    for name in ("torchaudio", "torchaudio._extension", "torchaudio._extension.utils"):
        sys.modules.pop(name, None)
    assert found == [False]


def test_the_profiler_finds_the_modules() -> None:
    """`with_stack` reads the first local of `Module.__call__`."""

    def job() -> None:
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
        ):
            for _ in range(3):
                model(torch.ones(1, 64, device="cuda")).sum().backward()
                optimizer.step()

    assert bytes_of(record(job), Role.PARAMETER) == 4 * 65 * 64
