"""Checkpoints of tensors without data: remembered, not written, and loaded again."""

from __future__ import annotations

import gc
import io
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memplan.capturing.sandbox import Sandbox

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def test_a_checkpoint_of_fake_tensors(tmp_path: Path, fake: FakeTensorMode) -> None:
    model = torch.nn.Linear(1000, 1000, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.empty(2, 1000)).sum().backward()
    optimizer.step()
    with Sandbox():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        torch.save(state, tmp_path / "tmp.pt")
        os.replace(tmp_path / "tmp.pt", tmp_path / "step-3.pt")
        shutil.copy(tmp_path / "step-3.pt", tmp_path / "best.pt")
        assert sorted(os.listdir(tmp_path)) == ["best.pt", "step-3.pt"]
        assert 0 < (tmp_path / "best.pt").stat().st_size < 4096
        loaded = torch.load(tmp_path / "best.pt", map_location="cpu")
        assert loaded["step"] == 3
        assert isinstance(loaded["model"]["weight"], FakeTensor)
        assert loaded["model"]["weight"].shape == (1000, 1000)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    assert os.listdir(tmp_path) == []


def test_loading_gives_a_copy_of_what_was_saved(tmp_path: Path, fake: FakeTensorMode) -> None:
    with Sandbox():
        state: dict[str, Any] = {"weights": [torch.empty(3)], "epoch": 1}
        torch.save(state, tmp_path / "x.pt")
        state["weights"].append(torch.empty(4))
        state["epoch"] = 2
        loaded = torch.load(tmp_path / "x.pt")
        assert loaded["epoch"] == 1
        assert len(loaded["weights"]) == 1
        assert loaded["weights"][0] is not state["weights"][0]


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_memory_lives_no_longer_than_in_a_real_run(
    tmp_path: Path, fake: FakeTensorMode, no_garbage_collection: None
) -> None:
    with Sandbox():
        weight = torch.empty(10)
        saved = weakref.ref(weight)
        torch.save({"x": weight}, tmp_path / "x.pt")
        safetensors.save_file({"x": weight}, tmp_path / "x.safetensors")
        del weight
        assert saved() is None
        for loaded in (
            torch.load(tmp_path / "x.pt"),
            safetensors.load_file(tmp_path / "x.safetensors"),
        ):
            again = weakref.ref(loaded["x"].untyped_storage())
            assert again() is not None
            loaded.clear()
            assert again() is None


def test_shared_storages_and_views_stay_so(tmp_path: Path, fake: FakeTensorMode) -> None:
    with Sandbox():
        table = torch.nn.Parameter(torch.empty(6, 4))
        torch.save({"in": table, "out": table, "part": table.detach()[2:4].t()}, tmp_path / "x.pt")
        loaded = torch.load(tmp_path / "x.pt")
        assert loaded["in"] is loaded["out"]
        assert isinstance(loaded["in"], torch.nn.Parameter)
        assert loaded["in"].requires_grad
        part = loaded["part"]
        assert (tuple(part.shape), part.stride(), part.storage_offset()) == ((4, 2), (1, 4), 8)
        assert part.untyped_storage()._cdata == loaded["in"].untyped_storage()._cdata


def test_a_whole_module_and_a_buffer_in_memory(tmp_path: Path, fake: FakeTensorMode) -> None:
    with Sandbox():
        buffer = io.BytesIO()
        torch.save(torch.nn.Linear(4, 5), buffer)
        (tmp_path / "model.pt").write_bytes(buffer.getvalue())
        with (tmp_path / "model.pt").open("rb") as file:
            module = torch.load(file, weights_only=False)
        assert isinstance(module, torch.nn.Linear)
        assert module.weight.shape == (5, 4)
        buffer.seek(0)
        assert torch.load(buffer, weights_only=False).bias.shape == (5,)


@pytest.mark.parametrize(
    "location",
    [
        "meta",
        torch.device("meta"),
        {"cpu": "meta"},
        lambda storage, place: storage.to(device="meta"),
    ],
)
def test_map_location(tmp_path: Path, fake: FakeTensorMode, location: Any) -> None:
    with Sandbox():
        torch.save(torch.empty(3), tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt", map_location=location).device.type == "meta"


def test_map_location_of_a_callable(tmp_path: Path) -> None:
    with Sandbox():
        torch.save(torch.empty(3, device="meta"), tmp_path / "x.pt")
        loaded = torch.load(tmp_path / "x.pt", map_location=lambda storage, place: storage)
        assert loaded.device.type == "cpu"
        left: Any = lambda storage, place: None  # noqa: E731
        assert torch.load(tmp_path / "x.pt", map_location=left).device.type == "meta"


def test_real_tensors_are_really_saved(tmp_path: Path) -> None:
    with Sandbox():
        torch.save({"x": torch.arange(5)}, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes()[:2] == b"PK"
        assert torch.load(tmp_path / "x.pt")["x"].tolist() == [0, 1, 2, 3, 4]
        mapped = torch.load(tmp_path / "x.pt", mmap=True)
        assert mapped["x"].tolist() == [0, 1, 2, 3, 4]
    assert os.listdir(tmp_path) == []


def test_a_real_tensor_beside_a_fake_one_keeps_its_values(tmp_path: Path) -> None:
    real = torch.arange(3)
    with Sandbox():
        torch.save({"rng": real, "weight": torch.empty(2, device="meta")}, tmp_path / "x.pt")
        real.zero_()
        loaded = torch.load(tmp_path / "x.pt")
        assert loaded["rng"].tolist() == [0, 1, 2]
        assert loaded["weight"].device.type == "meta"


def test_what_cannot_be_pickled_fails_as_in_torch(tmp_path: Path, fake: FakeTensorMode) -> None:
    with Sandbox(), pytest.raises(Exception, match=r"lambda|pickle"):
        torch.save({"f": lambda: 0, "x": torch.empty(1)}, tmp_path / "x.pt")


def test_hooks_decide_what_is_fake_and_how_it_is_made(tmp_path: Path) -> None:
    made: list[tuple[int, torch.dtype, torch.device]] = []

    def new(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append((nbytes, dtype, device))
        return torch.empty(nbytes // dtype.itemsize, dtype=dtype)

    with Sandbox(is_fake=lambda tensor: True, new_tensor=new):
        torch.save(torch.zeros(3, 5, dtype=torch.float16), tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt").shape == (3, 5)
    assert made == [(30, torch.float16, torch.device("cpu"))]


def test_scripted_modules(tmp_path: Path) -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 3))
    with Sandbox():
        torch.jit.save(scripted, tmp_path / "x.ts")
        assert torch.jit.load(tmp_path / "x.ts")(torch.zeros(1, 2)).shape == (1, 3)
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3, device="meta")), tmp_path / "y.ts")
        assert torch.jit.load(tmp_path / "y.ts").weight.shape == (3, 2)
        scripted.save(tmp_path / "z.ts")
        assert torch.jit.load(tmp_path / "z.ts")(torch.zeros(1, 2)).shape == (1, 3)
        traced = torch.jit.trace(torch.nn.Linear(2, 3, device="meta"), torch.zeros(1, 2).to("meta"))
        traced.save(str(tmp_path / "t.ts"))
        assert torch.jit.load(tmp_path / "t.ts").weight.shape == (3, 2)
    assert os.listdir(tmp_path) == []


def test_safetensors(tmp_path: Path, fake: FakeTensorMode) -> None:
    path = tmp_path / "model.safetensors"
    with Sandbox():
        tensors = {"a": torch.empty(2, 3, dtype=torch.bfloat16), "b": torch.empty(4)}
        safetensors.save_file(tensors, path, metadata={"format": "pt"})
        loaded = safetensors.load_file(path)
        assert {k: (v.shape, v.dtype) for k, v in loaded.items()} == {
            "a": ((2, 3), torch.bfloat16),
            "b": ((4,), torch.float32),
        }
        with safetensors.safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert sorted(file.keys()) == ["a", "b"]
            assert file.get_slice("a").get_shape() == [2, 3]
            assert file.get_slice("a").get_dtype() == "BF16"
            assert file.get_slice("b")[1:].shape == (3,)
        data = safetensors.save(tensors)
        assert safetensors.load(data)["b"].shape == (4,)
        model = torch.nn.Linear(3, 2)
        safetensors.save_model(model, str(path))
        safetensors.load_model(model, path)
    assert os.listdir(tmp_path) == []


def test_real_safetensors(tmp_path: Path) -> None:
    with Sandbox():
        safetensors.save_file({"a": torch.arange(3)}, tmp_path / "x.safetensors")
        assert safetensors.load_file(tmp_path / "x.safetensors")["a"].tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == []


def test_functions_are_put_back(tmp_path: Path) -> None:
    before = (torch.save, torch.load, torch.serialization.save, safetensors.save_file)
    with Sandbox():
        assert torch.save is not before[0]
    after = (torch.save, torch.load, torch.serialization.save, safetensors.save_file)
    assert after == before
