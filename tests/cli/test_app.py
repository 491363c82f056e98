"""The command line as a whole: exit codes, messages, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan import __version__
from memplan.cli import app, main
from memplan.cli.command import positive
from memplan.cli.streams import write_answer

ROOT = Path(__file__).resolve().parents[2]


def memplan(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "memplan", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        for name in ("estimate", "simulate", "export", "env"):
            assert f"\n  {name} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "version"):
        assert main([word]) == 0
        assert capsys.readouterr().out == f"memplan {__version__}\n"


@pytest.mark.parametrize("command", ["estimate", "simulate", "export", "env"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([command, "--help"], ["help", command]):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith(f"usage: memplan {command}")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["estimat"], "no command 'estimat'", "memplan estimate"),
        (["train.py"], "no command 'train.py'", "memplan estimate train.py"),
        (["xyzzy"], "no command 'xyzzy'", "memplan --help"),
        (["estimate"], "no script given", "memplan estimate --gpu 24GiB train.py"),
        (["estimate", "--gup", "l4", "x"], "unrecognized arguments: --gup", "--gpu, or"),
        (
            ["estimate", "--lr", "1", "x"],
            "unrecognized arguments: --lr",
            "options of the script come after its name",
        ),
        (
            ["simulate", "--lr=1", "x"],
            "unrecognized arguments: --lr=1",
            "try: `memplan simulate --help`\n",
        ),
        (["estimate", "--GPU", "l4", "x"], "unrecognized arguments: --GPU", "--gpu, or"),
        (["estimate", "--alloc_conf=a", "x"], "unrecognized arguments", "try: --alloc-conf, or"),
        (["estimate", "--batch_size", "1", "x"], "unrecognized arguments", "try: `memplan"),
        (["estimate", "--trace", "a", "x"], "unrecognized arguments", "try: `memplan"),
        (["estimate", "--gpu"], "argument --gpu: expected one argument", "--help"),
        (["estimate", "--steps", "-1", "x"], "'-1' is not a number of steps", "--help"),
        (["estimate", "--steps", "x", "y"], "'x' is not a number of steps", "--help"),
        (["simulate", "nosuchfile"], "nosuchfile does not exist", "memplan estimate -o"),
        (["simulate", "."], ". is a folder", ""),
        (["export", "-o", "x", "y"], "required: --format", "--help"),
        (["export", "--format", "pdf", "-o", "x", "y"], "'pdf'", "--help"),
    ],
)
def test_usage_errors(
    words: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memplan: error: ") and message in err and hint in err
    assert "Traceback" not in err


def test_whole_numbers_as_people_type_them() -> None:
    for text in ("1000000", "1_000_000", "1e6"):
        assert positive(text) == 1_000_000
    for text in ("1.5", "0", "nan", "inf", "1e-3", "1e999999999", "9" * 5000):
        with pytest.raises(ArgumentTypeError):
            positive(text)


def test_a_fault_of_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str], *, own_process: bool) -> int:
        raise KeyError("nothing")

    monkeypatch.setattr(app, "_dispatch", fail)
    monkeypatch.delenv("MEMPLAN_DEBUG", raising=False)
    assert main(["env"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("memplan: a fault of memplan itself: KeyError: 'nothing' (at ")
    assert "MEMPLAN_DEBUG=1" in err and "Traceback" not in err
    monkeypatch.setenv("MEMPLAN_DEBUG", "1")
    assert main(["env"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_machine_too_small_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str], *, own_process: bool) -> int:
        raise MemoryError

    monkeypatch.setattr(app, "_dispatch", fail)
    assert main(["report"]) == 4
    assert "error: this machine's memory is not enough" in capsys.readouterr().err


def _interrupted() -> None:
    raise KeyboardInterrupt


def _interrupted_in_native_code() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise SystemError("returned a result with an exception set")  # noqa: B904


@pytest.mark.parametrize("interrupt", [_interrupted, _interrupted_in_native_code])
def test_an_interrupt_is_quiet(
    interrupt: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, "_dispatch", lambda words, *, own_process: interrupt())
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "memplan: interrupted\n"


def test_starting_up_imports_neither_torch_nor_numpy() -> None:
    for words in ("['--help']", "['estimate', '--help']"):
        code = f"import sys, memplan.cli as c; c.main({words}); print(sorted(sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        loaded = done.stdout.splitlines()[-1]
        assert "'memplan.cli.app'" in loaded
        assert "'torch'" not in loaded and "'numpy'" not in loaded


def test_a_stage_without_torch() -> None:
    stages = "memplan.types.estimate, memplan.estimation, memplan.report.terminal, memplan.cli"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; import {stages}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.stdout == "False\n", done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import os, sys; from memplan.cli.streams import write_answer\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "write_answer('x' * 100_000); sys.exit(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 3 and done.stderr == ""


def test_answers_are_flushed(capsys: pytest.CaptureFixture[str]) -> None:
    write_answer("now\n")
    assert capsys.readouterr().out == "now\n"


def test_as_a_process() -> None:
    done = memplan("estimate", "nosuch.py")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("memplan: error: no script nosuch.py\n  try: ")
