"""Scripts that fail, end early, or are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError, MemplanError, UsageError
from tests.capturing.training.scripts import HEAD, indented, run


def test_a_script_that_swallows_everything_still_stops(tmp_path: Path) -> None:
    body = """
while True:
    try:
        forward(torch.randn(4, 512)).backward()
        optimizer.step()
        optimizer.zero_grad()
    except Exception:
        print("ignored")
"""
    assert run(tmp_path, body).meta.optimizer_steps == 3


PRINTS_AND_EXITS = """
import sys
try:
    {}
except Exception as error:
    print(error)
    sys.exit(1)
"""
"""As Hydra does around a job."""


def test_a_short_epoch_that_ends_in_an_exit_code(tmp_path: Path) -> None:
    counted = """
seen = 0
for (batch,) in loader:
    forward(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen += 1
assert seen == len(loader)"""
    trace = run(tmp_path, PRINTS_AND_EXITS.format(counted.replace("\n", "\n    ")))
    assert trace.meta.optimizer_steps == 3
    assert any("AssertionError" in said.text for said in trace.meta.assumptions)


def test_gradients_without_an_optimizer_are_an_answer(tmp_path: Path) -> None:
    script = tmp_path / "saliency.py"
    script.write_text(
        "import torch\n"
        "x = torch.randn(64, 512, device='cuda', requires_grad=True)\n"
        "print(torch.autograd.grad(x.square().sum(), x)[0].shape)"
    )
    options = CaptureOptions(profile=find_profile("rtx4090"))
    trace = capture_script(ScriptTarget("script", str(script), ()), options)
    assert any("no optimizer was made" in note for note in trace.meta.notes)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("forward(torch.randn(4, 512))", CaptureError, "without a single optimizer step"),
        ("forward(torch.randn(4, 512)).backward()\ndel optimizer", CaptureError, "a single optimi"),
        ("raise ValueError('no such file')", CaptureError, r"train.py:\d+.*ValueError: no such"),
        ("for x in range(3)\n    pass", CaptureError, r"train.py:12: SyntaxError: expected ':'\n"),
        (
            "import helper",
            CaptureError,
            r"helper.py:2: IndentationError: unexpected indent\n",
        ),
        ("import sys; sys.exit(3)", CaptureError, "exit code 3"),
        (
            "import sys; sys.exit('no data')",
            CaptureError,
            "before its first steps were seen, with exit code 1: no data",
        ),
        (PRINTS_AND_EXITS.format("{}['lr']"), CaptureError, r"train.py:\d+: .*KeyError: 'lr'"),
        (
            PRINTS_AND_EXITS.format("torch.hub.load('owner/name', 'model')"),
            CaptureError,
            r"wanted to reach github.com",
        ),
        (
            "import argparse as a; p = a.ArgumentParser(); p.add_argument('d'); p.parse_args()",
            UsageError,
            "exit code 2, as scripts do that refuse their arguments",
        ),
    ],
)
def test_bad_scripts(tmp_path: Path, body: str, error: type[MemplanError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        run(tmp_path, body)
    assert raised.value.hint


def test_arguments_that_a_script_refuses(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse; argparse.ArgumentParser().parse_args()")
    options = CaptureOptions(profile=find_profile("rtx4090"))
    with pytest.raises(UsageError) as raised:
        capture_script(ScriptTarget("script", str(script), ("--nope",)), options)
    assert raised.value.hint.startswith(f"python {script} --help")


def test_a_package_that_a_script_misses(tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as raised:
        run(tmp_path, "raise ImportError('Make sure to install tensorboard for logging.')")
    assert raised.value.hint.startswith("install what it asks for")


def test_a_misspelt_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    options = CaptureOptions(profile=find_profile("rtx4090"))
    with pytest.raises(CaptureError, match=r"No module named jobs\.trian") as raised:
        capture_script(ScriptTarget("module", "jobs.trian"), options)
    assert raised.value.hint.startswith("the right name")


def test_a_script_on_the_cpu(tmp_path: Path) -> None:
    body = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
    with pytest.raises(CaptureError, match="CPU only"):
        run(tmp_path, body, head="")


def test_a_script_that_is_not_there() -> None:
    options = CaptureOptions(profile=find_profile("rtx4090"))
    with pytest.raises(UsageError, match="no such script"):
        capture_script(ScriptTarget("script", "nowhere/train.py"), options)


def test_a_script_finds_what_lies_beside_it_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    main = sys.modules["__main__"]
    (tmp_path / "train.py").write_text(
        "import os, pathlib, pickle, sys\n"
        "class Config: pass\n"
        "assert sys.argv == ['train.py', '--x'], sys.argv\n"
        "assert isinstance(pickle.loads(pickle.dumps(Config())), Config)\n"
        "os.chdir('elsewhere')\n"
        "assert pathlib.Path(__file__).read_text()\n"
        + HEAD
        + "while True:\n"
        + indented("torch.randn(4, 512)", 4)
    )
    options = CaptureOptions(profile=find_profile("rtx4090"))
    trace = capture_script(ScriptTarget("script", "train.py", ("--x",)), options)
    assert trace.meta.optimizer_steps == 3
    assert sys.modules["__main__"] is main
