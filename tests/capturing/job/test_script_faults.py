"""What to try when a script raises an error of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.capturing.job import faults as script_faults
from memplan.capturing.job.faults import hint_of
from memplan.capturing.options import CaptureOptions, RankPlace
from memplan.types.device import find_profile

OPTIONS = CaptureOptions(profile=find_profile("rtx4090"))


@pytest.mark.parametrize(
    "message",
    [
        "You requested gpu: [0, 1]\n But your machine only has: [0]",
        "this example needs at least 2 GPUs",
        "Not enough CUDA devices: 4 asked for",
    ],
)
def test_more_devices_than_one(message: str) -> None:
    assert "--world-size N" in hint_of(RuntimeError(message), "train.py", OPTIONS)


def test_other_faults_are_not_taken_for_it() -> None:
    hint = hint_of(ValueError("only one of lr and schedule"), "train.py", OPTIONS)
    assert "--world-size" not in hint


@pytest.mark.parametrize(
    ("message", "of_the_world"),
    [
        ("world size (8) is not divisible by total_model_size (total_model_size=3)", True),
        ("global batch 9 must be divisible by micro batch 1 * data_parallel_size (8)", True),
        ("8 ranks cannot be divided into groups of 3", True),
        ("device mesh (2, 3) does not fit", True),
        ("Number of layers should be divisible by the pipeline-model-parallel size", False),
        ("num_query_groups (2) must be a multiple of tensor parallel size (4)", False),
        ("LoRA rank must be positive", False),
        ("expert parallel size 4 does not divide 80 experts", False),
    ],
)
def test_sizes_that_do_not_fit_the_world(message: str, of_the_world: bool) -> None:
    profile = find_profile("h100")
    options = CaptureOptions(profile=profile, place=RankPlace(0, 8, 8))
    hint = hint_of(AssertionError(message), "train.py", options)
    assert ("the world has 8 ranks" in hint) == of_the_world


def test_a_package_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lib", "wandb"):
        Path(name).mkdir()
    Path("lib", "data.py").touch()
    hints = [
        hint_of(ModuleNotFoundError(f"No module named {name!r}", name=name), "jobs/t.py", OPTIONS)
        for name in ("lib.data", "wandb")
    ]
    assert hints[0].startswith("PYTHONPATH=. in front: Python looks for lib beside jobs/t.py")
    assert "PYTHONPATH" not in hints[1]  # what a run has left there


def test_a_typo_ends_a_real_run_too() -> None:
    hint = hint_of(NameError("name 'modle' is not defined"), "train.py", OPTIONS)
    assert hint == "mend train.py: a real run would end there too"


@pytest.mark.parametrize(
    "message",
    [
        "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them",
        "Cannot reach https://huggingface.co/x: offline mode is enabled.",
    ],
)
def test_what_was_never_downloaded(message: str) -> None:
    assert "--allow-network" in hint_of(OSError(message), "train.py", OPTIONS)
    networked = CaptureOptions(profile=find_profile("rtx4090"), allow_network=True)
    assert "--allow-network" not in hint_of(OSError(message), "train.py", networked)


def raised_by(code: str, filename: str = "train.py") -> BaseException:
    try:
        exec(compile(code, filename, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_each_fault_gets_the_hint_that_is_true_of_it() -> None:
    def hint(code: str, filename: str = "train.py") -> str:
        return hint_of(raised_by(code, filename), "train.py", OPTIONS)

    removed = hint("import numpy\nnumpy.int")
    assert removed.startswith("the numpy installed here (")
    assert hint("from numpy import no_such_name") == removed
    assert "a check of train.py" in hint("assert 1 == 2")
    ours = hint("raise TypeError('unexpected keyword')", script_faults.__file__)
    assert "a fault of memplan" in ours
    assert "may end there too" in hint("{}['missing']")
    for text in (removed, ours, hint("assert 1 == 2"), hint("{}['missing']")):
        assert "leave" not in text


def test_a_script_that_reads_its_input_is_told_how() -> None:
    hint = hint_of(EOFError("EOF when reading a line"), "train.py", OPTIONS)
    assert hint == "what train.py reads from its input: echo ANSWER | memplan estimate … train.py …"
