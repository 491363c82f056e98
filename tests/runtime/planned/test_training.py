"""Real PyTorch trainings on the planned allocator, over the stand-in driver: the same numbers, bit
for bit, whatever the plan; and what the plan brings."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from memplan.runtime.planned.library import DRIVER_VARIABLE
from memplan.types.plan_file import load_plan
from tests import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SEEN = {"evaluate_every": 2, "log_every": 3, "short_every": 4}
"""Requests that no plan knows: evaluations, norms now and then, a smaller last batch."""


@pytest.fixture(scope="module")
def cpu_adaptor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`cpu_adaptor.cpp`, built against the installed PyTorch."""
    path = tmp_path_factory.mktemp("adaptor") / "cpu_adaptor.so"
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", abi,
         "-isystem", str(root / "include"), str(HERE / "cpu_adaptor.cpp"),
         "-L", str(root / "lib"), "-lc10", "-o", str(path)],
        check=True,
    )  # fmt: skip
    return path


class Trainings:
    """Runs of `cpu_job.py`, several to a process."""

    def __init__(self, library: Path, driver: Path, adaptor: Path, folder: Path) -> None:
        self._head = {"library": str(library), "adaptor": str(adaptor)}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, DRIVER_VARIABLE: str(driver), "PYTHONPATH": path}
        self.folder = folder

    def __call__(self, *runs: dict[str, Any]) -> list[dict[str, Any]]:
        job, out = self.folder / "job.json", self.folder / "out.json"
        job.write_text(json.dumps({**self._head, "runs": runs}), encoding="utf-8")
        words = (str(HERE / "cpu_job.py"), str(job), str(out))
        done = warm.run(ROOT, *words, env=self._environment)
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return found


@pytest.fixture
def trainings(
    planned_library: Path, standin_driver: Path, cpu_adaptor: Path, tmp_path: Path
) -> Trainings:
    return Trainings(planned_library, standin_driver, cpu_adaptor, tmp_path)


def same_numbers(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["losses"] == b["losses"] and a["digest"] == b["digest"])


def hit_rate(run: dict[str, Any]) -> float:
    counts = run["counts"]
    served = counts["hits"] + counts["dynamic"]
    return float(served / max(served + counts["adopted"] + counts["misses"], 1))


@pytest.mark.parametrize("model", ["transformer", "convolutions"])
def test_a_job_is_recorded_planned_and_served_with_the_same_numbers(
    trainings: Trainings, model: str
) -> None:
    plan = str(trainings.folder / "plan")
    plain = {"model": model, "steps": 12}
    changing = {**plain, **SEEN}
    reference, expected, learned, served, perturbed = trainings(
        plain,
        changing,
        {**plain, "planned": True, "save_plan": plan},
        {**plain, "planned": True, "plan": plan},
        {**changing, "planned": True, "plan": plan},
    )
    for run in (learned, served):
        assert same_numbers(reference, run)
    assert same_numbers(expected, perturbed)
    assert not same_numbers(reference, expected)
    switches = learned["outcome"]["plans"]
    assert [0 < switch["step"] < 8 for switch in switches] == [True]
    assert learned["outcome"]["hit_rate"] >= 0.95
    assert hit_rate(served) >= 0.95
    assert hit_rate(perturbed) >= 0.7
    for run in (learned, served):  # what `memplan run --watch` shows is what the library counts
        watched, counted = run["watched"], run["counted"]
        assert watched["steps"] == 12
        for name in ("allocated", "reserved"):
            assert watched[name] == counted[name]
            assert watched[f"{name}_peak"] >= counted[f"{name}_peak"] > 0
        assert "step 12 " in run["shown"] and "a plan is in effect" in run["shown"]
    part = load_plan(plan).allocation
    assert part is not None and served["watched"]["arena"] == part.arena_bytes


def test_routing_by_values_is_served_from_reusable_space(trainings: Trainings) -> None:
    plan = str(trainings.folder / "plan")
    job = {"model": "routed", "steps": 10}
    reference, learned, served = trainings(
        job,
        {**job, "planned": True, "save_plan": plan},
        {**job, "planned": True, "plan": plan},
    )
    assert same_numbers(reference, learned)
    assert same_numbers(reference, served)
    assert served["counts"]["dynamic"] > 0
    assert hit_rate(served) >= 0.8


def test_a_plan_of_another_job_costs_memory_only(trainings: Trainings) -> None:
    plan = str(trainings.folder / "plan")
    job = {"model": "transformer", "steps": 4, "micro_batches": 2}
    other = {"model": "convolutions", "steps": 8, "planned": True, "save_plan": plan}
    reference, _, wrong = trainings(job, other, {**job, "planned": True, "plan": plan})
    assert same_numbers(reference, wrong)
