"""The real run that captures are compared with."""

from __future__ import annotations

import pytest

from tests.capture.distributed import mesh_jobs
from tests.capture.distributed.real_ranks import Sizes, run_module


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Sizes]:
    """By world size and rank, for each job, the sizes that its second step asks for."""
    return run_module(mesh_jobs.__name__, tmp_path_factory.mktemp("real"))
