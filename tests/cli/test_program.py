"""Where our options end and the user's program begins."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from memplan.capturing.options import ScriptTarget
from memplan.cli import estimate
from memplan.cli.command import Parser
from memplan.cli.program import check_program, split_program
from memplan.types.errors import UsageError


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="memplan estimate", allow_abbrev=False)
    estimate.prepare_parser(parser)
    return parser


def script(name: str, *argv: str) -> ScriptTarget:
    return ScriptTarget("script", name, argv)


def module(name: str, *argv: str) -> ScriptTarget:
    return ScriptTarget("module", name, argv)


@pytest.mark.parametrize(
    ("line", "own", "program"),
    [
        ("train.py", "", script("train.py")),
        ("--gpu l4 train.py --lr 1", "--gpu l4", script("train.py", "--lr", "1")),
        ("--gpu=l4 train.py", "--gpu=l4", script("train.py")),
        ("--json train.py --json", "--json", script("train.py", "--json")),
        ("train.py -o out -f --help", "", script("train.py", "-o", "out", "-f", "--help")),
        ("-o t.trace -f train.py -m x", "-o t.trace -f", script("train.py", "-m", "x")),
        ("-ot.trace train.py", "-ot.trace", script("train.py")),
        ("-fo t.trace train.py", "-fo t.trace", script("train.py")),
        ("--steps 3 -m pkg.train -m y", "--steps 3", module("pkg.train", "-m", "y")),
        ("-mpkg.train --json", "", module("pkg.train", "--json")),
        ("--gpu --x=8 train.py", "--gpu=--x=8", script("train.py")),
        ("--gpu --steps=8 train.py", "--gpu --steps=8", script("train.py")),
        ("--json -- -odd.py --x", "--json", script("-odd.py", "--x")),
        ("train.py a -- b", "", script("train.py", "a", "--", "b")),
        ("train.py --gpu h100", "", script("train.py", "--gpu", "h100")),
        ("--json", "--json", None),
        ("", "", None),
    ],
)
def test_split(
    parser: argparse.ArgumentParser, line: str, own: str, program: ScriptTarget | None
) -> None:
    assert split_program(parser, line.split()) == (own.split(), program)


def test_an_unknown_option_is_refused_before_the_script(parser: argparse.ArgumentParser) -> None:
    own, _ = split_program(parser, ["--jsn", "train.py"])
    with pytest.raises(UsageError) as caught:
        parser.parse_args(own)
    assert "--jsn" in caught.value.message and "train.py" not in caught.value.message
    assert "--json" in caught.value.hint


def test_abbreviations_are_refused(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(UsageError):
        parser.parse_args(["--alloc", "x"])


def test_module_without_a_name(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(UsageError, match="-m needs the name of a module"):
        split_program(parser, ["-m"])


def test_a_misspelt_script_gets_near_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "rnn.py").touch()
    with pytest.raises(UsageError) as caught:
        check_program(script(str(tmp_path / "trian.py")), "usage")
    assert caught.value.message == f"no script {tmp_path / 'trian.py'}"
    assert caught.value.hint == str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        (script("pkg.train"), "or -m MODULE"),
        (module("pkg/train.py"), "pkg/train.py without -m"),
        (script("nosuchprogram"), "if nosuchprogram is a program that starts one, what it starts"),
    ],
)
def test_a_program_named_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: ScriptTarget, hint: str
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        check_program(program, "usage")
    assert hint in caught.value.hint


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        check_program(script(str(tmp_path)), "usage")
    with pytest.raises(UsageError, match="no script") as caught:
        check_program(script(str(tmp_path / "no" / "train.py")), "usage")
    assert "does not exist" in caught.value.hint


@pytest.mark.parametrize("name", ["nosuchmodule", "no-such", "..relative", ""])
def test_a_module_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="no module"):
        check_program(module(name), "usage")


def test_a_module_beside_us_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_us.py").write_text("raise SystemExit('must not be imported')")
    monkeypatch.chdir(tmp_path)
    assert check_program(module("beside_us"), "usage") == module("beside_us")


def test_no_program_at_all() -> None:
    with pytest.raises(UsageError, match="no script given") as caught:
        check_program(None, "memplan estimate train.py")
    assert caught.value.hint == "memplan estimate train.py"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("job.trace", b""),
        ("job.py", b"\x93memplan trace\n"),
        ("snapshot", b"\x80\x04\x95"),
        ("log.csv", b"id,size"),
    ],
)
def test_a_recording_is_no_script(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="is a recording, not a script") as caught:
        check_program(script(str(tmp_path / name)), "usage")
    assert caught.value.hint == f"memplan simulate {tmp_path / name}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("train.ipynb", b'{"cells": []}', "is a notebook", "nbconvert --to script"),
        ("train.sh", b"torchrun train.py", "is a shell script", "the command in it"),
        ("train", b"#!/bin/bash\npython train.py", "is a shell script", "the command in it"),
        ("go", b"#!/usr/bin/env -S zsh -e\n", "is a shell script", "the command in it"),
    ],
)
def test_notebooks_and_shell_scripts(
    tmp_path: Path, name: str, content: bytes, message: str, hint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        check_program(script(str(tmp_path / name)), "usage")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"import torch",
        "é = 1".encode(),
        b"\xef\xbb\xbfx = 1",
        b"#!/usr/bin/env python3\n",
        b"#!/home/bash/env/bin/python\n",
        b"#!/usr/bin/env -S uv run --script\n",
    ],
)
def test_a_script_is_a_script(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train").write_bytes(content)
    assert check_program(script(str(tmp_path / "train")), "usage").name == str(tmp_path / "train")
