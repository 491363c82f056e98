"""Who sees a stand-in: imports that would end the program, and whoever was told to."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.job.faults import hint_of
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.capturing.standins.finder import DISTRIBUTIONS, VERSIONS, has_stand_in
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError, UsageError
from memplan.types.trace import Trace

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash_attn is installed"
)


def run(job: Callable[[], object], *packages: str) -> Trace:
    options = CaptureOptions(profile=find_profile("a100-80gb"), packages=packages)
    with CaptureSession(options) as session, suppress(EnoughSeen):
        job()
    return session.trace()


def guarded() -> bool:
    try:
        import flash_attn  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return False
    return True


def suppressed() -> bool:
    with suppress(ImportError):
        import flash_attn  # noqa: F401

        return True
    return False


def probed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def versioned() -> bool:
    try:
        return bool(importlib.metadata.version("flash_attn"))
    except importlib.metadata.PackageNotFoundError:
        return False


PROBES = [guarded, suppressed, probed, versioned]


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_sees_what_is_installed(probe: Callable[[], bool]) -> None:
    seen: list[bool] = []
    run(lambda: seen.append(probe()))
    assert seen == [False]


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_sees_a_package_that_the_job_has(probe: Callable[[], bool]) -> None:
    seen: list[bool] = []
    run(lambda: seen.append(probe()), "flash-attn")
    assert seen == [True]


def test_an_import_that_would_end_the_program_gets_the_stand_in() -> None:
    def job() -> None:
        import flash_attn

        assert importlib.metadata.version("flash_attn") == flash_attn.__version__

    notes = run(job).meta.notes
    assert any("a stand-in for flash_attn" in note for note in notes)
    assert not [name for name in sys.modules if name.startswith("flash_attn")]
    assert importlib.util.find_spec("flash_attn") is None


def test_a_handler_that_raises_is_no_guard() -> None:
    imported: list[str] = []

    def job() -> None:
        try:
            from flash_attn import flash_attn_func
        except ImportError as error:
            raise RuntimeError("install flash-attn") from error
        imported.append(flash_attn_func.__name__)

    run(job)
    assert imported == ["flash_attn_func"]


def test_the_script_is_told_of_what_it_did_without() -> None:
    notes = run(guarded).meta.notes
    assert any("test_imports.py:" in note and "--with flash_attn" in note for note in notes)


def test_names_that_the_stand_in_lacks() -> None:
    def job() -> None:
        from flash_attn import flash_attn_with_kvcache

        flash_attn_with_kvcache(torch.empty(1, device="cuda"))

    with pytest.raises(CaptureError) as caught:
        run(job)
    assert "flash_attn.flash_attn_with_kvcache cannot be captured" in caught.value.message
    assert "test_imports.py:" in caught.value.message


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed"
)
def test_deepspeed_is_to_be_installed() -> None:
    def job(use: bool) -> None:
        import deepspeed  # type: ignore[import-not-found]

        assert deepspeed.__version__
        assert not isinstance(torch.nn.Linear(2, 2), deepspeed.DeepSpeedEngine)
        assert deepspeed.DeepSpeedEngine | None
        if use:
            with deepspeed.zero.Init():
                pass

    run(lambda: job(False))
    with pytest.raises(CaptureError, match=r"deepspeed.zero.Init cannot be captured") as caught:
        run(lambda: job(True))
    assert "DS_BUILD_OPS=0 pip install deepspeed" in caught.value.hint

    def trainer() -> None:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})

    with pytest.raises(CaptureError, match=r"test_imports.py:\d+: the job wants DeepSpeed"):
        run(trainer)


def test_an_unknown_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the test of fake CUDA: a process that ends right after it may be aborted."""
    monkeypatch.setattr("memplan.capturing.session.self_test", lambda: pytest.fail("tested"))
    with pytest.raises(UsageError, match="no stand-in for no_such_package"):
        run(guarded, "no_such_package")


def test_what_is_advised_is_accepted() -> None:
    for package in (*VERSIONS, "no_such_package"):
        error = ModuleNotFoundError(name=package)
        hint = hint_of(error, "train.py", CaptureOptions(profile=find_profile("a100-80gb")))
        advised = re.findall(r"--with (\S+?)[;: ]", hint)
        if package not in VERSIONS:
            assert advised == ["RULES.py"]
        elif has_stand_in(package):
            assert advised == [DISTRIBUTIONS.get(package, package)]
            run(guarded, *advised)
        else:  # its own Python runs, once it is installed
            assert not advised and "pip install" in hint


def test_a_file_of_rules(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text(
        "import memplan, torch\n"
        "@memplan.register_rule('company_kernels.norm')\n"
        "def norm(call, x):\n"
        "    return torch.empty_like(x)\n"
    )

    def job() -> None:
        from company_kernels import norm  # type: ignore[import-not-found]

        assert norm(torch.empty(4, device="cuda")).shape == (4,)

    run(job, str(file))
    with pytest.raises(UsageError, match="no such file of rules"):
        run(job, str(tmp_path / "absent.py"))
    file.write_text("1 / 0\n")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        run(job, str(file))
