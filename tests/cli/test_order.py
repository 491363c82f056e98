"""`memplan order`: a captured trace or a graph file in, peaks out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memplan.cli import main
from memplan.order import baselines, solve
from memplan.order.baselines import Candidate, baseline_orders, best
from memplan.phases.op_graph import op_graph
from memplan.types.deadline import Deadline
from memplan.types.trace_file import load_trace
from tests.order.graphs import make_graph, write_graph
from tests.order.test_solve import random_graph, training_step, weak_bound
from tests.schemas import read_answer

SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda()
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for _ in range(4):
    model(torch.randn(4, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    script, path = folder / "train.py", folder / "job.trace"
    script.write_text(SCRIPT, encoding="utf-8")
    assert main(["estimate", "--gpu", "rtx4090", "-o", str(path), str(script)]) == 0
    return path


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "step.graph"
    write_graph(training_step(20, batch=1), path)
    return path


def test_a_trace(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["order", "--json", "--timeout", "20", str(job)]) == 0
    answer = read_answer("order", capfd.readouterr().out)
    graph = op_graph(load_trace(job))
    candidates = baseline_orders(graph)
    assert answer["schema_version"] == 1 and answer["gpu"] == "rtx4090"
    assert answer["torch_version"] == torch.__version__
    assert answer["operators"] == len(graph)
    assert answer["program_peak_bytes"] == candidates[0].peak_bytes
    assert answer["baseline_peak_bytes"] == min(c.peak_bytes for c in candidates)
    assert answer["lower_bound_bytes"] <= answer["ordered_peak_bytes"]
    assert answer["ordered_peak_bytes"] <= answer["baseline_peak_bytes"]
    assert answer["ordered_peak_bytes"] < answer["program_peak_bytes"]  # updates come early
    assert answer["optimal"] is (answer["lower_bound_bytes"] == answer["ordered_peak_bytes"])
    assert answer["seconds"] > 0
    layout = answer["layout"]
    assert layout["ordered"]["height_bytes"] >= answer["ordered_peak_bytes"]
    assert 0 <= layout["ordered"]["fragmentation"] < 0.01
    saved = 1 - layout["ordered"]["height_bytes"] / layout["program"]["height_bytes"]
    assert layout["order_and_layout_saved"] == pytest.approx(saved, abs=1e-6)


def test_a_graph_file(graph_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["order", "--json", str(graph_file)]) == 0
    answer = read_answer("order", capfd.readouterr().out)
    assert answer["gpu"] is None and answer["status"] == "solved" and answer["optimal"]
    assert main(["order", str(graph_file)]) == 0
    text = capfd.readouterr().out
    assert text.startswith("allocated peak")
    assert "the least possible" in text and "below program order" in text


def test_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.graph"
    broken.write_text('{"memplan_graph": 1, "base_bytes": 0}\n{"name": 3}\n', encoding="utf-8")
    compressed = tmp_path / "step.graph.gz"
    compressed.write_bytes(b"\x1f\x8b\x08\x00")
    for words, says in (
        ([str(tmp_path / "none")], "none"),
        ([str(tmp_path)], "is a folder"),
        ([str(compressed)], "neither a memplan trace nor a graph file"),
        ([str(Path(__file__))], "trace"),
        ([str(broken)], "line 2"),
        (["--timeout", "0", str(broken)], "seconds"),
    ):
        assert main(["order", *words]) == 2
        out, err = capfd.readouterr()
        assert out == "" and says in err and "Traceback" not in err


def test_a_graph_file_may_begin_with_a_mark_and_empty_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.graph"
    for begin in ("\ufeff", "\n \r\n"):
        path.write_text(begin + '{"memplan_graph": 1, "base_bytes": 7}\n', encoding="utf-8")
        assert main(["order", "--json", str(path)]) == 0
        assert read_answer("order", capfd.readouterr().out)["ordered_peak_bytes"] == 7


def test_the_baselines_are_computed_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(*words: Any) -> list[Candidate]:
        asked.append(1)
        return baseline_orders(*words)

    monkeypatch.setattr(baselines, "baseline_orders", counted)
    for graph in (training_step(20, batch=1), random_graph(30)):  # the second needs a search
        path = tmp_path / f"{len(graph)}.graph"
        write_graph(graph, path)
        asked.clear()
        assert main(["order", "--json", str(path)]) == 0
        answer = read_answer("order", capfd.readouterr().out)
        assert len(asked) == 1
        assert answer["baseline_peak_bytes"] == best(baseline_orders(graph)).peak_bytes


def test_out_of_time_before_anything_is_known(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at once: neither PyTorch's orders nor a bound."""
    path = tmp_path / "step.graph"
    write_graph(make_graph([set(), set()], [(3, 0, {1}, False)]), path)

    made = Deadline.__init__

    def ended(self: Deadline, *seconds: float, **how: bool) -> None:
        made(self, *seconds, **how)
        self.end()

    monkeypatch.setattr(Deadline, "__init__", ended)
    monkeypatch.setattr(solve, "cut_bound", weak_bound)
    monkeypatch.setattr(solve, "lower_bound", weak_bound)
    assert main(["order", str(path)]) == 0
    out = capfd.readouterr().out
    assert "cancelled: the best so far" in out and "none in time" in out and "not known" in out


def test_ctrl_c_gives_the_best_so_far(tmp_path: Path) -> None:
    path = tmp_path / "step.graph"
    write_graph(random_graph(600), path)
    running = subprocess.Popen(
        [sys.executable, "-c", WAITS, "order", "--json", "--timeout", "500", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stderr is not None and running.stderr.readline() == "searching\n"
    time.sleep(0.5)
    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=240)
    answer = read_answer("order", out)
    assert running.returncode == 0 and "interrupted" in err
    assert answer["status"] == "cancelled" and not answer["optimal"]
    assert answer["ordered_peak_bytes"] <= answer["program_peak_bytes"]


WAITS = """
import sys
import memplan.order.solve as solver
from memplan.cli import main

original = solver.refine

def refine(*words):
    print("searching", file=sys.stderr, flush=True)
    return original(*words)

solver.refine = refine
sys.exit(main(sys.argv[1:]))
"""


def test_a_module_without_an_optimizer_has_nothing_to_update(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from memplan.capturing.module import capture_module
    from memplan.capturing.options import CaptureOptions
    from memplan.types.device import find_profile
    from memplan.types.trace_file import save_trace

    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    options = CaptureOptions(profile=find_profile("rtx4090"))
    path = tmp_path / "module.trace"
    save_trace(capture_module(module, (torch.randn(4, 8),), {}, options), path)
    assert main(["order", "--json", str(path)]) == 0
    assert read_answer("order", capfd.readouterr().out)["optimal"] in (True, False)
