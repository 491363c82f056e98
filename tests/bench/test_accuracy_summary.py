"""The accuracy benchmark: rows to commands, answers to figures, figures to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.accuracy.rows import LLM_JOBS, SHARED_DATA, Row, job_rows, llm_rows
from bench.accuracy.summary import (
    Answer,
    Compared,
    as_json,
    percentile_90,
    published,
    summarize_jobs,
    summarize_llm,
)
from bench.accuracy.table import BEGIN, line, write_docs
from bench.pages import END

HEADER = (
    "model,family,optimizer,batch_size,zero_grad_mode,gpu,measured_bytes,xmem_bytes,"
    "dnnmem_bytes,llmem_bytes,schedtune_bytes\n"
)


def answer(nbytes: int, variant: str = "mode 0", low: int = 0, high: int = 0) -> Answer:
    return Answer(variant, nbytes, low or nbytes, high or nbytes, True, 0, 1.0)


def row(measured: int, *variants: str, **published_bytes: float) -> Row:
    commands = {name: ["script.py"] for name in variants or ("mode 0",)}
    return Row("a/b/1", "H100", measured, commands, published_bytes=published_bytes)


def test_a_job_becomes_the_command_that_replays_it(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text(
        HEADER
        + "VGG16,cnn,Adam,543,,NVIDIA GeForce RTX 3060,1000,900,800.5,,\n"
        + "T5-small,transformer,SGD,17,2,NVIDIA A100-SXM4-40GB,2000,,,,\n"
    )
    vgg, t5 = job_rows(file)
    assert set(vgg.commands) == {"mode 0", "mode 1"}
    assert vgg.commands["mode 1"][-2:] == ["--zero-grad-mode", "1"]
    assert Path(vgg.commands["mode 0"][0]).name == "cnn_loop.py"
    assert vgg.published_bytes == {"xmem": 900.0, "dnnmem": 800.5}
    assert set(t5.commands) == {"mode 2"}
    assert t5.commands["mode 2"][1:] == [
        "--model", "T5-small", "--optimizer", "SGD", "--batch-size", "17", "--zero-grad-mode", "2",
    ]  # fmt: skip
    assert Path(t5.commands["mode 2"][0]).name == "transformer_loop.py"
    for replay in (vgg, t5):
        assert Path(next(iter(replay.commands.values()))[0]).is_file()


@pytest.mark.skipif(not (SHARED_DATA / "measured").is_dir(), reason="no shared data")
def test_every_measured_row_has_a_command_and_xmem_its_published_error() -> None:
    jobs = job_rows()
    assert len(jobs) == 21
    assert len({one.key for one in jobs}) == 21
    xmem = published(jobs)["xmem"]
    assert xmem["median_error"] == pytest.approx(0.030, abs=5e-4)
    assert xmem["p90_error"] == pytest.approx(0.106, abs=5e-4)
    assert {one.key for one in llm_rows()} == set(LLM_JOBS)


def test_the_better_of_two_unrecorded_modes_counts_and_the_fixed_one_is_told() -> None:
    unrecorded = Compared(
        row(100, "mode 0", "mode 1"), [answer(99, "mode 0"), answer(110, "mode 1")]
    )
    recorded = Compared(row(100), [answer(103)])
    summary = summarize_jobs([unrecorded, recorded])
    assert summary["count"] == 2
    assert summary["median_error"] == pytest.approx(0.02)
    assert summary["fixed_mode_1"]["median_error"] == pytest.approx(0.065)
    assert summary["unrecorded_in_mode_1"] == pytest.approx(
        {"count": 1, "median_error": 0.1, "p90_error": 0.1, "worst_error": 0.1}
    )


def test_intervals_are_held_to_the_truth() -> None:
    too_low = Compared(row(100), [answer(90, low=85, high=95)])
    around = Compared(row(100), [answer(100, low=90, high=110)])
    too_high = Compared(row(100), [answer(120, low=115, high=125)])
    summary = summarize_llm([too_low, around, too_high])
    assert (summary["high_below_truth"], summary["low_above_truth"]) == (1, 1)
    assert summary["median_interval_width"] == pytest.approx(0.1)
    assert summary["worst_error"] == pytest.approx(0.2)


def test_percentile_interpolates_linearly() -> None:
    assert percentile_90([float(value) for value in range(11)]) == 9.0
    assert percentile_90([0.0, 1.0]) == pytest.approx(0.9)
    assert percentile_90([3.0]) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile_90([])


def test_published_estimators_count_only_the_rows_they_answer() -> None:
    found = published([row(100, xmem=90.0, llmem=50.0), row(100, xmem=120.0)])
    assert found["xmem"]["count"] == 2
    assert found["xmem"]["median_error"] == pytest.approx(0.15)
    assert found["llmem"]["count"] == 1
    assert "dnnmem" not in found


def test_the_page_gets_the_tables_between_its_marks(tmp_path: Path) -> None:
    compared = [Compared(row(2 << 30, xmem=float(1 << 30)), [answer(3 << 30)])]
    jobs = {**summarize_jobs(compared), "rows": [as_json(one) for one in compared]}
    llm = {**summarize_llm(compared), "rows": jobs["rows"]}
    result = tmp_path / "accuracy.json"
    data = {"jobs": jobs, "llm": llm, "transformers_of_the_jobs": "4.51.3"}
    document = {"date": "2026-01-02T03", "commit": "c" * 40, "versions": {"torch": "2"}}
    result.write_text(json.dumps({**document, "data": data}))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs(result, page)
    written = page.read_text()
    assert written.startswith("before\n") and written.endswith("after\n")
    assert "old" not in written
    assert "| a/b/1 | H100 | 2.00 | 3.00 (3.00 to 3.00) | +50.0 % | -50.0 % |" in written
    assert "| xmem | 1 | 50.0 % | 50.0 % | 50.0 % |" in written
    assert "+50.0 %" in line(jobs["rows"][0])
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        write_docs(result, page)
