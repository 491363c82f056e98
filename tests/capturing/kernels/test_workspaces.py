"""cuBLAS workspaces: sizes by device and environment, and which products use cuBLASLt."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.capturing.kernels import workspaces as ws
from memplan.types.trace import EventKind, Provenance

A100, H100, B200, RTX5090 = (8, 0), (9, 0), (10, 0), (12, 0)
LARGE = 32 << 20
SHARED = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}


@pytest.mark.parametrize(
    ("capability", "size"),
    [((7, 5), 8_519_680), (A100, 8_519_680), (H100, LARGE), (B200, LARGE), (RTX5090, LARGE)],
)
def test_default_size(capability: tuple[int, int], size: int) -> None:
    assert ws.cublas_workspace_bytes(capability, {}) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (":4096:8", 32 << 20),
        (":16:8", 128 << 10),
        (":4096:2:16:8", 8_519_680),
        (":0:0", 0),
        ("", 8_519_680),
        ("4096", 8_519_680),
        ("nonsense", 8_519_680),
    ],
)
def test_environment_overrides(text: str, size: int) -> None:
    assert ws.cublas_workspace_bytes(A100, {"CUBLAS_WORKSPACE_CONFIG": text}) == size


def test_cublaslt_may_share_the_workspace_and_is_capped_by_it() -> None:
    def size(capability: tuple[int, int], **env: str) -> int:
        return ws.cublaslt_workspace_bytes(capability, {**SHARED, **env})

    assert size(H100) == LARGE
    assert size(A100, CUBLASLT_WORKSPACE_SIZE="2048") == 2 << 20
    assert size(A100, CUBLASLT_WORKSPACE_SIZE="999999") == 8_519_680
    assert size(A100, CUBLASLT_WORKSPACE_SIZE="x") == 8_519_680
    assert ws.cublaslt_workspace_bytes(A100, {}) == 1 << 20


def linear(**changes: object) -> bool:
    given: dict[str, object] = {"mat1": (32, 64), "mat2": (64, 128), "bias": (128,)}
    given |= {"bias_contiguous": True, "beta": 1.0, "dtype": "float32", "env": {}}
    return ws.addmm_uses_cublaslt(**(given | changes))  # type: ignore[arg-type]


def test_which_products_use_cublaslt() -> None:
    assert linear()
    assert linear(bias=(1, 128))
    assert not linear(bias=(32, 128))
    assert not linear(bias=(1,))
    assert not linear(beta=0.5)
    assert not linear(dtype="complex64")
    assert not linear(bias_contiguous=False)
    assert not linear(mat1=(1, 64))
    assert not linear(mat2=(64, 1), bias=(1,))
    assert not linear(env={"DISABLE_ADDMM_CUDA_LT": "1"})


def requests(op: str, env: dict[str, str], lt: bool = True) -> list[tuple[str, int]]:
    return ws.workspace_requests(op, lt=lt, capability=A100, env=env)


def test_requests() -> None:
    assert requests("aten.addmm", SHARED) == [("cublas", 8_519_680)]
    assert requests("aten.addmm", {}) == [("cublas", 8_519_680), ("cublaslt", 1 << 20)]
    assert requests("aten.mm", {}, lt=False) == [("cublas", 8_519_680)]
    assert requests("aten.add", {}, lt=False) == []


def test_no_workspace_is_requested_where_the_environment_forbids_one() -> None:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    assert ws.workspace_requests("aten.addmm", lt=True, capability=A100, env=env) == []


def test_every_operator_named_exists() -> None:
    torch = pytest.importorskip("torch")
    for name in ws.BLAS_OPS:
        base = name.removeprefix("aten.")
        assert hasattr(torch.ops.aten, base), name


def test_products_ask_once_for_what_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables take long to read: as long as a small product takes to capture."""
    torch = pytest.importorskip("torch")
    from memplan.capturing.operators import kernel_memory
    from tests.capturing.jobs import record

    asked: list[str] = []
    plain = ws.workspace_requests

    def counted(op: str, **rest: Any) -> list[tuple[str, int]]:
        asked.append(op)
        return plain(op, **rest)

    monkeypatch.setattr(kernel_memory, "workspace_requests", counted)

    def job() -> None:
        x = torch.randn(32, 32, device="cuda")
        for _ in range(5):
            x = torch.addmm(x[0], x @ x, x)

    trace = record(job)
    scratch = [e for e in trace if e.storage >= 0 and e.provenance == Provenance.RULE]
    assert [e.bytes for e in scratch if e.kind == EventKind.ALLOC] == [8_519_680, 1 << 20]
    assert asked == ["aten.mm", "aten.addmm"]
