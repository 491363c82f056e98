"""Kernels that the script compiles itself, or that a package fetches from the Hub."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memplan
from memplan.capturing.standins import registry
from memplan.types.errors import CaptureError
from tests.capturing.jobs import allocations, assumed, operators, record
from tests.capturing.standins.packages import absent, made

KERNEL = 'extern "C" __global__ void twice(const float* x, float* out, int n) {}'


def test_a_kernel_of_cuda_source_writes_what_it_is_given() -> None:
    def job() -> None:
        twice = torch.cuda._compile_kernel(KERNEL, "twice")
        twice.set_shared_memory_config(64 << 10)
        x = torch.arange(256, device="cuda", dtype=torch.float32)
        out = torch.zeros_like(x)
        twice(grid=(1, 1, 1), block=(256, 1, 1), args=[x, out, 256], stream=torch.cuda.Stream())
        assert not bool(out[0] > 1)  # not known any more, and no zero either

    trace = record(job)
    assert operators(trace)["twice"] == 1
    assert [event.bytes for event in allocations(trace)][:2] == [1024, 1024]
    assert any("CUDA source are not run" in text for text in assumed(trace))
    assert ("twice", "nvrtc") in {(kernel.op, kernel.kernel) for kernel in trace.meta.kernels}


@absent("triton")
@pytest.mark.parametrize("whole", [True, False])
def test_a_graph_with_a_kernel_of_the_stand_in_runs_uncompiled(whole: bool) -> None:
    def job() -> None:
        import triton  # type: ignore[import-not-found]

        @triton.jit
        def double(x, out):  # type: ignore[no-untyped-def]
            pass

        @torch.compile(fullgraph=whole)
        def step(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            double[(1,)](x, out)
            return out + 1

        for _ in range(2):  # PyTorch asks again
            step(torch.empty(256, device="cuda"))

    trace = record(job, "triton")
    assert operators(trace)["double"] == 2
    assert [event.bytes for event in allocations(trace)] == [1024] * 6
    (text,) = [text for text in assumed(trace) if "could not be compiled" in text]
    assert "install Triton, which needs no GPU" in text


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package like `kernels`, on a machine without a network."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from .load import get_kernel, has_kernel\nfrom .layer import LayerRepository\n"
    )
    (folder / "load.py").write_text(
        "def get_kernel(repo_id, *, version=None):\n    raise ConnectionError(repo_id)\n"
        "def has_kernel(repo_id, *, version=None):\n    raise ConnectionError(repo_id)\n"
    )
    (folder / "layer.py").write_text(
        "from .load import get_kernel\n"
        "class LayerRepository:\n"
        "    def __init__(self, repo_id, *, layer_name):\n"
        "        self._repo_id, self.layer_name = repo_id, layer_name\n"
        "    def _resolve_revision(self):\n"
        "        raise ConnectionError(self._repo_id)\n"
        "    def load(self):\n"
        "        return get_kernel(self._repo_id, version=self._resolve_revision())\n"
        "    def __str__(self):\n"
        "        return self._repo_id + self._resolve_revision()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def in_hub(use: Callable[[], None]) -> Callable[[], None]:
    def job() -> None:
        try:
            use()
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
                del sys.modules[name]

    return job


@absent("flash_attn")
@pytest.mark.usefixtures("hub")
def test_a_kernel_of_the_hub_is_the_package_that_has_its_functions() -> None:
    def use() -> None:
        kernels = importlib.import_module("kernels")

        name = "kernels-community/flash-attn2"
        assert kernels.has_kernel(name, version=4)
        assert not kernels.has_kernel("kernels-community/activation", version=1)
        q = torch.empty(2, 64, 8, 64, device="cuda", dtype=torch.bfloat16)
        kernels.get_kernel(name, version=4).flash_attn_func(q, q, q)

    assert made(record(in_hub(use)), "flash_attn::_flash_attn_forward")[0] == q_bytes()


def q_bytes() -> int:
    return 2 * 64 * 8 * 64 * 2


@pytest.mark.usefixtures("hub")
def test_another_kernel_of_the_hub_takes_what_rules_say() -> None:
    def use() -> None:
        importlib.import_module("kernels").get_kernel("somebody/my-relu").relu(
            torch.empty(8, device="cuda")
        )

    with pytest.raises(CaptureError, match="somebody/my-relu is fetched from the Hub") as caught:
        record(in_hub(use))
    assert 'register_rule("my_relu.FUNCTION"' in caught.value.hint
    try:
        memplan.register_rule("my_relu.relu", lambda call, x: call.workspace(100))
        assert made(record(in_hub(use)), "my_relu.relu") == [100]
    finally:
        registry._rules.pop("my_relu.relu", None)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("use", ["load", "__str__"])
def test_a_layer_of_the_hub_is_refused_with_what_to_leave_out(use: str) -> None:
    def take() -> None:
        repository = importlib.import_module("kernels").LayerRepository
        layer = repository("kernels-community/liger-kernels", layer_name="LigerRMSNorm")
        getattr(layer, use)()

    with pytest.raises(CaptureError, match="LigerRMSNorm of the kernel") as caught:
        record(in_hub(take))
    assert "use_kernels" in caught.value.hint
