"""The harness of timm's table: rows, their order, and a captured step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.timm_table.capture import request, trace_path
from bench.timm_table.fits import asked, one_format_each, score
from bench.timm_table.rows import TimmRow, next_larger, read_rows, spread_out
from memplan.types.trace import Phase, Role
from memplan.types.trace_file import save_trace
from memplan.worker.pool import Workers
from tests.estimation.jobs import MIB, Job

LINES = """model,memory_format,batch_size,image_size,step_ms,samples_per_second,parameters_million
b,nchw,512,224,100.5,5094.5,1.0
a,nchw,96,160,20.0,4800.0,2.0
a,nhwc,128,160,20.0,6400.0,2.0
c,nchw,64,224,30.0,2133.3,3.0
"""


def rows(tmp_path: Path) -> list[TimmRow]:
    file = tmp_path / "table.csv"
    file.write_text(LINES, encoding="utf-8")
    return read_rows(file)


def test_rows_are_read_and_name_their_job(tmp_path: Path) -> None:
    first, *_, last = rows(tmp_path)
    assert first == TimmRow("b", "nchw", 512, 224, 0.1005)
    assert last.with_batch(96).key == "c.nchw.224.96"
    assert "--channels-last" not in first.arguments
    assert "--channels-last" in first._replace(memory_format="nhwc").arguments


def test_the_batch_that_did_not_fit_is_the_one_before() -> None:
    assert next_larger(512) is None
    assert (next_larger(96), next_larger(1)) == (128, 2)
    with pytest.raises(ValueError, match="not in tuple"):
        next_larger(100)


def test_every_beginning_is_spread_over_the_families(tmp_path: Path) -> None:
    family = {"a": "x", "b": "x", "c": "y"}
    assert [row.model for row in spread_out(rows(tmp_path), family)] == ["b", "c", "a", "a"]


def test_one_row_of_each_model_in_formats_by_turns(tmp_path: Path) -> None:
    ordered = rows(tmp_path)[1:]
    assert [(one.model, one.memory_format) for one in one_format_each(ordered)] == [
        ("a", "nhwc"),
        ("c", "nchw"),
    ]
    assert [one.model for one in one_format_each(rows(tmp_path))] == ["b", "a", "c"]


def test_verdicts_are_held_to_what_ran(tmp_path: Path) -> None:
    def job(row: TimmRow, gib: float) -> None:
        one = Job()
        one.at(Phase.FORWARD, "aten::relu")
        one.alloc(int(gib * 1024) * MIB, Role.ACTIVATION)
        save_trace(one.build(), trace_path(row, tmp_path))

    first, small, large, missing = (
        TimmRow(name, "nchw", batch, 224, 0.1)
        for name, batch in (("first", 512), ("small", 256), ("large", 256), ("missing", 256))
    )
    job(first, 20)
    job(small, 14)
    job(small.with_batch(384), 21)
    job(large, 24)
    trace_path(large.with_batch(384), tmp_path).with_suffix(".failed").write_text("")
    job(missing, 20)
    assert [truth for _, truth in asked(first)] == [True]
    found = score([first, small, large, missing], tmp_path)
    assert (found["models"], found["right"], found["with_two_answers"]) == (3, 1, 2)
    assert found["said_not_to_fit"] == [large.key]
    assert found["larger_said_to_fit"] == [small.key]
    assert found["not_captured"] == [large.key]

    known = {missing.key: [{"fits": True, "truth": True}, {"fits": False, "truth": False}]}
    known[small.key] = known[missing.key]
    again = score([first, small, large, missing], tmp_path, known)
    assert (again["models"], again["right"]) == (4, 2), "captures that are there count first"


def test_a_row_is_captured_as_its_table_was_measured() -> None:
    pytest.importorskip("timm")
    row = TimmRow("vit_tiny_patch16_224", "nchw", 4, 224, 0.1)
    with Workers() as workers:
        trace = workers.ended(request(row)).trace()
    names = np.array(trace.strings)[trace.ops.name]
    step = trace.ops.step == 1
    assert trace.meta.gpu == "rtx3090" and len(trace.meta.steady_steps) == 2
    assert "aten._softmax.default" in names[step]  # attention is written out
    assert not [name for name in names[step] if name.startswith("aten._foreach")]
    zeroed = (names == "aten.zero_.default") & step
    updated = (names == "aten.mul_.Tensor") & step & (trace.ops.phase == Phase.OPTIMIZER)
    assert zeroed.sum() == updated.sum() > 100  # one a parameter
