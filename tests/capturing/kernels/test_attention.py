"""The table of attention kernels: each row is one of PyTorch's own checks deciding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memplan.capturing.kernels.attention import (
    Choice,
    Mask,
    SdpaCall,
    SdpaEnvironment,
    choose_sdpa,
    head_alignment,
    wheel_cudnn_version,
)

V100, T4, A100, A10, L4, H100, B200, B300, RTX5090 = (
    (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0),
)  # fmt: skip
BASE = SdpaCall((2, 8, 128, 64), (2, 8, 128, 64), (2, 8, 128, 64), "bfloat16")


def call(head: int = 64, **changes: Any) -> SdpaCall:
    shapes: dict[str, Any] = {**dict.fromkeys("qkv", (2, 8, 128, head)), "requires_grad": True}
    return replace(BASE, **(shapes | changes))


def env(capability: tuple[int, int], **changes: Any) -> SdpaEnvironment:
    return replace(SdpaEnvironment(capability), **changes)


LONG_KEYS: dict[str, Any] = {"k": (2, 8, 256, 64), "v": (2, 8, 256, 64)}
GROUPED: dict[str, Any] = {"k": (2, 2, 128, 64), "v": (2, 2, 128, 64), "enable_gqa": True}
BOOL_MASK = Mask((2, 1, 128, 128), "bool")
FLOAT_MASK = Mask((128, 128), "bfloat16")
DEEPSEEK: dict[str, Any] = {"q": (2, 8, 128, 192), "k": (2, 8, 128, 192), "v": (2, 8, 128, 128)}
ONE_QUERY: dict[str, Any] = {"q": (2, 8, 1, 64)}
ONLY_CUDNN: dict[str, Any] = {"enabled": frozenset({"cudnn"})}

# name, call, environment, kernel, part of a reason
TABLE = [
    ("bf16 on Ampere", call(), env(A100), "flash", "every check passes"),
    ("bf16 on Ada", call(), env(L4), "flash", "every check passes"),
    ("bf16 on Hopper, 2.13", call(), env(H100), "cudnn", "every check passes"),
    ("bf16 on Blackwell, 2.13", call(), env(B200), "cudnn", "every check passes"),
    ("bf16 on sm120", call(), env(RTX5090), "flash", "every check passes"),
    ("fp16 on Turing", call(dtype="float16"), env(T4), "efficient", "capability 7.5"),
    ("bf16 on Turing", call(), env(T4), "math", "dtype bfloat16"),
    ("fp16 on Volta", call(dtype="float16"), env(V100), "efficient", "capability 7.0"),
    ("fp32 on Volta", call(dtype="float32"), env(V100), "efficient", "capability 7.0"),
    ("fp32 on Ampere", call(dtype="float32"), env(A100), "efficient", "dtype float32"),
    ("fp32 on Hopper", call(dtype="float32"), env(H100), "efficient", "not cudnn: dtype float32"),
    ("fp64", call(dtype="float64"), env(A100), "math", "not efficient: dtype float64"),
    ("mixed dtypes", call(kv_dtypes=("bfloat16", "float32")), env(A100), "math",
     "different dtypes"),
    ("bool mask on Ampere", call(mask=BOOL_MASK), env(A100), "efficient", "mask is given"),
    ("float mask on Ampere", call(mask=FLOAT_MASK), env(A100), "efficient", "mask is given"),
    ("bool mask on Hopper", call(mask=BOOL_MASK), env(H100), "cudnn", "every check passes"),
    ("mask with grad on Hopper", call(mask=replace(FLOAT_MASK, requires_grad=True)), env(H100),
     "efficient", "not cudnn: the mask requires grad"),
    ("3-d mask on Hopper", call(mask=Mask((8, 128, 128), "bool")), env(H100), "efficient",
     "neither 2- nor 4-dimensional"),
    ("mask of a wrong size", call(mask=Mask((2, 3, 128, 128), "bool")), env(H100), "efficient",
     "does not broadcast"),
    ("mask with stride", call(mask=replace(FLOAT_MASK, last_stride_one=False)), env(A100), "math",
     "not efficient: the last dimension of the mask"),
    ("causal, square", call(is_causal=True), env(A100), "flash", "every check passes"),
    ("causal, not square", call(is_causal=True, **LONG_KEYS), env(A100), "efficient",
     "causal with different"),
    ("causal, not square, Hopper", call(is_causal=True, **LONG_KEYS), env(H100), "cudnn",
     "every check passes"),
    ("cross attention", call(**LONG_KEYS), env(A100), "flash", "every check passes"),
    ("head size 80", call(80), env(A100), "flash", "every check passes"),
    ("head size 20 is padded", call(20), env(A100), "flash", "every check passes"),
    ("head size 20, fp32", call(20, dtype="float32"), env(A100), "efficient", "dtype float32"),
    ("head size 21, fp32", call(21, dtype="float32"), env(A100), "math", "not a multiple of 4"),
    ("head size 20 and mask", call(20, mask=BOOL_MASK), env(A100), "math", "not a multiple of 8"),
    ("head size 21, fp32, Volta", call(21, dtype="float32"), env(V100), "efficient", "7.0"),
    ("head size 256", call(256), env(A100), "flash", "every check passes"),
    ("head size 264", call(264), env(A100), "efficient", "above 256"),
    ("head size 256 on Hopper", call(256), env(H100), "cudnn", "every check passes"),
    ("head size 256 on Blackwell", call(256), env(B200), "flash", "head size above 128"),
    ("192/128 on Blackwell", call(**DEEPSEEK), env(B200), "cudnn", "every check passes"),
    ("192/128 on Ampere", call(**DEEPSEEK), env(A100), "efficient", "head sizes of query, key and"),
    ("head size 200, trained, 8.6", call(200), env(A10), "efficient", "193 to 224"),
    ("head size 200, inference, 8.6", call(200, requires_grad=False), env(A10), "flash", ""),
    ("head size 256, trained, 8.9", call(256), env(L4), "flash", "every check passes"),
    ("head size 256, dropout, 8.9", call(256, dropout_p=0.1), env(L4), "efficient", "with dropout"),
    ("head size 256, dropout, sm120", call(256, dropout_p=0.1), env(RTX5090), "efficient",
     "with dropout"),
    ("dropout", call(dropout_p=0.1), env(A100), "flash", "every check passes"),
    ("dropout on Hopper", call(dropout_p=0.1), env(H100), "cudnn", "every check passes"),
    ("dropout 0.1, 2.14", call(dropout_p=0.1), env(H100, torch_version=(2, 14, 0)), "flash",
     "multiple of 1/16"),
    ("grouped heads", call(**GROUPED), env(A100), "flash", "every check passes"),
    ("grouped heads, mask", call(mask=BOOL_MASK, **GROUPED), env(A100), "math",
     "numbers of heads of query, key and value differ"),
    ("grouped heads, mask, 2.14", call(mask=BOOL_MASK, **GROUPED), env(A100,
     torch_version=(2, 14, 0)), "efficient", "mask is given"),
    ("grouped heads, mask, Hopper", call(mask=BOOL_MASK, **GROUPED), env(H100), "cudnn", ""),
    ("grouped heads, fp32", call(dtype="float32", **GROUPED), env(A100), "math", "numbers of"),
    ("grouped heads not declared", call(**(GROUPED | {"enable_gqa": False})), env(A100), "math",
     "numbers of heads"),
    ("heads that do not divide", call(k=(2, 3, 128, 64), v=(2, 3, 128, 64), enable_gqa=True),
     env(A100), "math", "do not divide"),
    ("batch sizes differ", call(k=(1, 8, 128, 64), v=(1, 8, 128, 64)), env(A100), "math", "batch"),
    ("3-dimensional", call(q=(8, 128, 64), k=(8, 128, 64), v=(8, 128, 64)), env(A100), "math",
     "4-dimensional"),
    ("empty sequence", call(k=(2, 8, 0, 64), v=(2, 8, 0, 64)), env(A100), "math", "empty"),
    ("last stride", call(last_strides_one=False), env(A100), "math", "stride other than 1"),
    ("head size 1, last stride", call(1, last_strides_one=False), env(A100), "flash", ""),
    ("one query on Hopper", call(**ONE_QUERY), env(H100), "cudnn", "every check passes"),
    ("one query, dropout, Hopper", call(dropout_p=0.1, **ONE_QUERY), env(H100), "flash",
     "query sequence of length 1"),
    ("one key on Hopper", call(k=(2, 8, 1, 64), v=(2, 8, 1, 64)), env(H100), "flash",
     "key sequence of length 1"),
    ("deterministic on Hopper", call(), env(H100, deterministic=True), "flash", "deterministic"),
    ("2.11 on Hopper", call(), env(H100, torch_version=(2, 11, 0)), "cudnn", ""),
    ("deprioritized", call(), env(H100, cudnn_deprioritized=True), "flash", ""),
    ("sm101", call(), env((10, 1)), "cudnn", ""),
    ("B300", call(), env(B300), "cudnn", ""),
    ("a capability of the future", call(), env((13, 0)), "math", "outside sm80 to sm121"),
    ("flash disabled", call(), env(A100, enabled=frozenset({"efficient", "math"})), "efficient",
     "not flash: disabled"),
    ("only cuDNN on Ampere", call(), env(A100, **ONLY_CUDNN), "cudnn", "not flash: disabled"),
    ("only cuDNN, fp32", call(dtype="float32"), env(A100, **ONLY_CUDNN), "none", "dtype float32"),
    ("priority", call(), env(A100, priority=("efficient", "flash")), "efficient", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sdpa", "where", "kernel", "reason"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(sdpa: SdpaCall, where: SdpaEnvironment, kernel: str, reason: str) -> None:
    choice = choose_sdpa(sdpa, where)
    assert choice.kernel == kernel, choice
    assert reason in choice.reason


def test_the_reason_names_every_kernel_that_was_passed_over() -> None:
    choice = choose_sdpa(call(mask=BOOL_MASK, **GROUPED), env(A100))
    assert isinstance(choice, Choice)
    assert choice.reason.startswith("not flash: an attention mask is given; not efficient:")


@pytest.mark.parametrize(
    ("dtype", "capability", "alignment"),
    [
        ("float16", A100, 8),
        ("float32", A100, 4),
        ("float16", V100, 8),
        ("float32", V100, 1),
        ("float16", (6, 1), 1),
    ],
)
def test_head_alignment(dtype: str, capability: tuple[int, int], alignment: int) -> None:
    assert head_alignment(dtype, capability) == alignment


def test_cudnn_of_the_wheels() -> None:
    assert wheel_cudnn_version((2, 11, 0)) == 91900
    assert wheel_cudnn_version((2, 13, 0)) >= 92000
