"""Private names of PyTorch: the lists are what the sources take; a name that is gone is said."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from memplan.capturing.patches import internals
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.patches.internals import NAMES, MissingNameError, refusal, require
from memplan.cli import app, main

SOURCES = Path(internals.__file__).parents[2]
SETTINGS = "torch._dynamo.config."
ELSEWHERE = {
    "capturing/patches/internals.py": "the lists",
    "capturing/cuda/device.py": "its self-test finds what is missing; a capture goes on without",
    "capturing/standins/packages": "each is used by jobs that import that package",
}


def part_of(path: str) -> str:
    return max((part for part in NAMES if path.startswith(f"{part}/")), key=len, default="")


def private(name: str) -> bool:
    return any(word.startswith("_") and not word.startswith("__") for word in name.split("."))


def chain(node: ast.AST) -> str:
    """`torch.a._b` of an expression that is nothing else."""
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return ".".join(["torch", *reversed(words)]) if getattr(node, "id", "") == "torch" else ""


def taken(tree: ast.Module) -> Iterator[str]:
    """Private names that a module takes from PyTorch: imports at its head, and `torch.…` anywhere;
    settings of its compiler also as strings.

    What a function imports is needed by that function alone; operators of other namespaces than
    `aten` come with modules of their own.
    """
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("torch"):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and str(node.value).startswith(SETTINGS):
            yield str(node.value)
        name = "" if id(node) in inner else chain(node)
        if name and (not name.startswith("torch.ops.") or name.startswith("torch.ops.aten.")):
            yield name


def test_the_lists_name_what_the_sources_take() -> None:
    found: dict[str, set[str]] = {part: set() for part in NAMES}
    for path in SOURCES.rglob("*.py"):
        place = path.relative_to(SOURCES).as_posix()
        if any(place.startswith(one) for one in ELSEWHERE):
            continue
        names = set(filter(private, taken(ast.parse(path.read_text()))))
        part = part_of(place)
        assert part or not names, f"{place} takes {names}: no part of NAMES is its folder"
        if part:
            found[part] |= names
    assert {part: sorted(names) for part, names in found.items()} == {
        part: sorted(names) for part, names in NAMES.items()
    }


@pytest.mark.parametrize("part", NAMES)
def test_the_installed_release_has_every_name(part: str) -> None:
    assert not list(internals._lacking(NAMES[part]))
    require(part)


def test_a_name_that_is_gone_is_said_before_the_part_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NAMES, "capturing", ("torch._C._was_here", "torch._went.away"))
    require.cache_clear()
    with pytest.raises(MissingNameError) as caught:
        require("capturing")
    require.cache_clear()
    assert caught.value.message == (
        f"PyTorch {torch.__version__} has no torch._C._was_here, torch._went.away, which memplan "
        "takes from inside it"
    )
    assert caught.value.exit_code == 4


def test_a_private_name_that_is_gone_is_not_replaced() -> None:
    patches = Patches()
    with pytest.raises(MissingNameError, match=r"has no torch.nn.modules.module.Module._was_here,"):
        patches.set(torch.nn.Module, "_was_here", None)
    patches.set(torch.nn.Module, "_memplan_own", None, new=True)
    patches.undo()
    assert not hasattr(torch.nn.Module, "_memplan_own")


def as_memplan(code: str) -> BaseException:
    """What a line of memplan's raises."""
    place = str(SOURCES / "capturing" / "somewhere.py")
    try:
        exec(compile(code, place, "exec"), {"torch": torch})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("torch._C._was_here", "torch._C._was_here"),
        ("torch.device('cpu')._was_here", "torch.device._was_here"),
        ("from torch._subclasses.fake_tensor import Gone", "torch._subclasses.fake_tensor.Gone"),
        ("import torch._gone", "torch._gone"),
        ("(1)._x", ""),
        ("import memplan._gone", ""),
        ("torch.zeros(1, dtype='x')", ""),
    ],
)
def test_an_error_about_a_name_of_pytorch_is_a_sentence(code: str, name: str) -> None:
    said = refusal(as_memplan(code))
    assert (said.message if said else "") == (name and MissingNameError(name).message)


def test_the_script_s_own_mistake_is_not_taken_for_ours() -> None:
    with pytest.raises(AttributeError) as caught:
        torch._C._was_here  # type: ignore[attr-defined]  # noqa: B018
    assert refusal(caught.value) is None


def test_a_module_that_cannot_be_adapted_is_refused_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The import itself passes: others import it without using it."""
    module = ModuleType("torch._moved")
    exec("class Stage:\n    pass\ndef helper(): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def adapt(module: ModuleType) -> None:
        raise MissingNameError(f"{module.__name__}.Stage._vote")

    watcher = ImportWatcher({module.__name__: adapt})
    watcher.start()
    try:
        for use in (module.Stage, module.helper):
            with pytest.raises(MissingNameError, match=r"has no torch._moved.Stage._vote,"):
                use()
    finally:
        watcher.stop()
    module.Stage()
    module.helper()


def test_the_command_line_says_it_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_args: object, **_kwargs: object) -> int:
        raise as_memplan("torch._C._was_here")

    monkeypatch.setattr(app, "_dispatch", fail)
    assert main(["env"]) == 4
    assert "has no torch._C._was_here, which memplan takes" in capfd.readouterr().err


def test_the_documentation_lists_them_all() -> None:
    page = (SOURCES.parents[1] / "docs" / "private-names.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `(.+)`$", page, re.MULTILINE)
    assert sorted(listed) == sorted({name for names in NAMES.values() for name in names})
    assert f"These {len(listed)} names" in page
