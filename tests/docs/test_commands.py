"""Every command that the documentation shows is one that memplan takes, and those that read files
or capture a small job are run."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import pickle
import re
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from memplan.cli import app, main
from memplan.cli.command import Parser
from memplan.cli.launchers.read import read_launch
from memplan.fit.choice import Limits
from tests.capturing.importers.snapshot_maker import MIB, Maker
from tests.docs.documented import PAGES, ROOT, Documented, blocks, commands, mentioned
from tests.fit.test_answer import chain, found

TRAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
rows = parser.parse_args().batch_size
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
net = net.to(device)
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(rows, 256, device=device)).sum().backward()
    optimizer.step()
"""
READERS = ("diff", "env", "export", "order", "place", "recompute", "report", "simulate")
"""Commands that run no script: all of theirs are run."""
NOT_RUN = ("--maximize", "--whole-run", "--with", "--world-size", "torchrun", "srun", "accelerate")
"""Captures of several processes, or several captures: other tests do them. They are parsed only."""
WITH_FILES = ("examples/",)
"""Jobs of the examples, which `tests/examples` captures."""
NAMED = commands()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the documentation name."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "train.py").write_text(TRAIN)
    (folder / "rules.py").write_text("")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture
def here(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, entered, with the files that nothing here writes."""
    maker = Maker(capacity=40 * MIB)
    maker.malloc(30 * MIB)
    with pytest.raises(MemoryError):
        maker.malloc(30 * MIB)
    (world / "oom.pickle").write_bytes(pickle.dumps(maker.snapshot(), 4))
    answer = found(chain("2600MiB"), Limits()).answer
    (world / "fit.json").write_bytes(msgspec.json.encode(answer))
    monkeypatch.chdir(world)
    return world


def test_they_are_many_and_of_all_kinds() -> None:
    assert len(NAMED) > 40
    assert {command.words[0] for command in NAMED} >= {*READERS, "estimate", "fit", "run", "sweep"}


@pytest.mark.parametrize("documented", NAMED, ids=str)
def test_memplan_takes_it(
    documented: Documented,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its parser takes the options, its readers of launchers the launcher's."""
    taken: list[argparse.Namespace] = []
    module = importlib.import_module(app.COMMANDS[documented.words[0]])

    def run(args: argparse.Namespace) -> int:
        taken.append(args)
        return 0

    monkeypatch.chdir(world)
    monkeypatch.setattr(module, "run", run)
    assert main(documented.words) == 0, capsys.readouterr().err
    if documented.words[0] == "verify" or "accelerate" in documented.words:
        return  # the trace is verify's first word; accelerate reads its command in seconds
    if module.TAKES_PROGRAM and taken[0].program is not None:
        launch = read_launch(taken[0].program, getattr(taken[0], "gpus_per_node", None))
        assert Path(launch.target.name).is_file() or launch.target.kind == "module"


def test_memplan_has_the_options_that_sentences_name() -> None:
    unknown = []
    for documented in mentioned():
        name, *rest = documented.words or [""]
        if name.startswith("-") or re.search(r"[A-Z…|]", name):
            continue
        command = app.load_command(name)
        parser = Parser(prog=name)
        command.prepare_parser(parser)
        known = {text for action in parser._actions for text in action.option_strings}
        own = rest[: next((at for at, word in enumerate(rest) if _is_program(word)), len(rest))]
        used = {
            word.partition("=")[0] for part in own for word in re.findall(r"--[a-z][a-z-]*", part)
        }
        unknown += [f"{documented}: {option}" for option in used - known]
    assert unknown == []


def _is_program(word: str) -> bool:
    return word.endswith(".py") or word in ("torchrun", "SCRIPT", "script.py", "accelerate")


def _is_run(documented: Documented) -> bool:
    name, *rest = documented.words
    if any(word.startswith(WITH_FILES) or word in NOT_RUN for word in documented.words):
        return False
    of_a_file = "--from-snapshot" in rest or "--from-trace" in rest
    return name in READERS or of_a_file or (name == "estimate" and bool({"-o", "--json"} & {*rest}))


def test_what_can_be_run_here_is_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the pages: what one command writes, others read."""
    commands = sorted(filter(_is_run, NAMED), key=lambda one: one.words[0] != "estimate")
    assert len(commands) > 15
    failed = []
    for documented in commands:
        words = documented.words
        output = documented.written or next(
            (file for option, file in pairwise(words) if option == "-o"), ""
        )
        if output:
            Path(output).unlink(missing_ok=True)
        if documented.written:
            with Path(output).open("w", encoding="utf-8") as file, redirect_stdout(file):
                code = main(words)
        else:
            code = main(words)
        said = capsys.readouterr().err
        if code not in (0, 3) or (output and not Path(output).stat().st_size):
            failed.append(f"{documented}: {code}\n{said}")
    assert failed == []


def test_python_is_python() -> None:
    """The blocks compile, and what they take of memplan is there."""
    import memplan

    taken = set()
    for page, text in blocks("python"):
        for node in ast.walk(ast.parse(text, page.name)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memplan"):
                source = _source(node.module or "")
                for alias in node.names:
                    assert re.search(rf"\b{alias.name}\b", source), f"{page.name}: {alias.name}"
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "memplan"
            ):
                taken.add(node.attr)
    assert {name for name in taken if not hasattr(memplan, name)} == set()
    assert {"estimate", "capture", "compile", "auto_checkpoint"} <= taken


def test_benchmarks_and_targets_that_pages_name_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    modules = set(re.findall(r"python -m (bench(?:\.\w+)*)", text))
    assert len(modules) > 15
    missing = [name for name in sorted(modules) if importlib.util.find_spec(name) is None]
    named = set(re.findall(r"`make ([a-z-]+)", text))
    assert len(named) > 8
    assert missing == [] and named - targets == set()


def _source(module: str) -> str:
    """Not imported: what it stands beside, such as Lightning, takes many seconds."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")


def test_every_command_has_its_help_in_the_reference() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^```\{command-help\} (\w+)$", page, re.MULTILINE) == list(app.COMMANDS)
