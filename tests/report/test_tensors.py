"""The table of the largest tensors: nothing that tells two of them apart is cut away."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from memplan.report.tensors import largest_lines
from memplan.report.text import cut_middle, wrap_name
from memplan.types.estimate import TensorInfo

GIB = 1 << 30


def tensor(name: str = "", op: str = "", module: str = "", **rest: Any) -> TensorInfo:
    fields: dict[str, Any] = {
        "shape": "8192x50257",
        "dtype": "float32",
        "role": "activation",
        "source": "a.py:1",
    }
    return TensorInfo(bytes=GIB, name=name, op=op, module=module, **{**fields, **rest})


def text(*tensors: TensorInfo, width: int = 80) -> str:
    return "\n".join(line.plain for line in largest_lines(list(tensors), width))


def squeezed(shown: str) -> str:
    return "".join(shown.split())


@pytest.mark.parametrize("width", [60, 80, 110])
def test_both_ends_of_a_long_name_are_shown(width: int) -> None:
    name = "model.language_model.layers.31.self_attn.compressor.q_projection.weight"
    shown = text(tensor(name, source="/job/train.py:12"), width=width)
    assert name in squeezed(shown)
    assert "train.py:12" in shown
    assert all(len(line) <= width for line in shown.splitlines())


def test_operator_and_module_are_shown_whole() -> None:
    shown = text(
        tensor(op="aten._log_softmax_backward_data.default", module="GPT2.head"),
        tensor(op="aten._log_softmax.default", module="GPT2.head"),
    )
    assert "_log_softmax_backward_data in GPT2.head,activation" in shown.replace("\n", "").replace(
        ", ", ","
    ).replace("  ", "")
    assert "_log_softmax in GPT2.head, activation" in shown


def test_names_that_differ_anywhere_read_differently() -> None:
    long = "encoder.blocks.{}.attention.output.dense.lora_A.default.weight"
    names = [long.format(number) for number in range(10, 20)]
    rows = text(*map(tensor, names)).split("8192x50257 float32")[1:]
    assert len(rows) == len(set(map(squeezed, rows))) == 10


def test_what_is_endless_is_cut_in_the_middle() -> None:
    shown = text(tensor("first." + "x" * 5000 + ".last"))
    assert "first." in shown and ".last" in shown and "..." in shown
    assert len(shown.splitlines()) <= 8


def test_files_of_one_name_are_told_apart_by_their_folder() -> None:
    shown = text(
        tensor(source="/lib/llama/modeling.py:3"),
        tensor(source="/lib/qwen/modeling.py:3"),
        tensor(source="/job/train.py:9"),
    )
    assert "llama/modeling.py:3" in shown and "qwen/modeling.py:3" in shown
    assert "/train.py" not in shown and "train.py:9" in shown


def test_tensors_that_read_alike_share_a_row() -> None:
    shown = text(tensor("w"), tensor("w"), tensor("v"))
    assert "2 x 1.0 GiB" in shown and len(shown.splitlines()) == 2


def test_gathered_parameters_are_called_that() -> None:
    shown = text(tensor("layers.0.weight", role="gathered_parameter"), width=110)
    assert "layers.0.weight, gathered parameter (FSDP all-gather)" in shown


def test_cut_middle() -> None:
    assert cut_middle("short", 10) == "short"
    assert cut_middle("abcdefghij", 7) == "ab...ij"
    for width in range(8):
        assert len(cut_middle("abcdefghij", width)) == width


def test_wrap_name() -> None:
    assert wrap_name("model.layers.0.mlp, activation", 14) == [
        "model.layers.",
        "0.mlp,",
        "activation",
    ]
    lines = wrap_name("a" * 50 + ".b", 20)
    assert all(len(line) <= 20 for line in lines) and "".join(lines) == "a" * 50 + ".b"
    for one, other in pairwise(wrap_name("one two three four", 8)):
        assert len(one) <= 8 and len(one) + len(other) >= 8


def test_a_group_shows_how_many_it_stands_for() -> None:
    shown = text(tensor(op="aten.mm.default", module="Net.blocks.*.mlp", count=24))
    assert shown.startswith(
        "  24 x 1.0 GiB  8192x50257 float32  mm in Net.blocks.*.mlp, activation"
    )
