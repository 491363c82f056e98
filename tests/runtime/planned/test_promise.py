"""What `fit` promises of planned addresses is what the library reserves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.run.perturbed import Replayer
from memplan.fit.flow import fit
from memplan.recompute.solve import Solver
from memplan.runtime.planned.library import DRIVER_VARIABLE
from tests.fit.fragmented_job import SCRIPT, Job, card, fragmented


def test_the_library_reserves_what_is_promised(
    planned_library: Path, standin_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(card(1500))
    fitted = fit(SCRIPT, job.profile, job, Solver())
    assert fitted.plan is not None and fitted.answer.after is not None
    assert fitted.plan.allocation is not None
    monkeypatch.setenv(DRIVER_VARIABLE, "")  # the replayer sets it
    library = shutil.copy(planned_library, tmp_path / "library.so")
    driver = shutil.copy(standin_driver, tmp_path / "driver.so")
    found = Replayer(Path(library), Path(driver)).run(fragmented(8), fitted.plan.allocation)
    assert found.missed == 0
    assert 0.9 < found.reserved_bytes / fitted.answer.after.reserved_peak_bytes <= 1
