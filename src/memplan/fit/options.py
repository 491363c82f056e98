"""The numeric options of a script: those on its command line, and those that its source declares.

Nothing of the script is run: its command line is read, and its source is parsed for calls that
declare options (`add_argument("--batch-size", default=8)`, click's `option`) and, where Hugging
Face's `HfArgumentParser` makes options of them, for fields of dataclasses.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from memplan.capturing.options import ScriptTarget

_MOST_BYTES = 4 << 20
_HF_DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""Defaults of `transformers.TrainingArguments`."""
_HF_PARSERS = frozenset({"HfArgumentParser", "TrlParser"})


@dataclass(frozen=True)
class Declared:
    """An option as the source declares it."""

    names: list[str]
    """Every spelling, with dashes."""
    default: int
    """0 where the source does not say, or says anything but a whole number above 0."""

    @property
    def longest(self) -> str:
        return max(self.names, key=len)


@dataclass(frozen=True)
class NumericOption:
    """An option and the value in force."""

    option: str
    """The option as it is typed: `--batch-size`, or `batch_size` for `batch_size=8`."""
    value: int


def plain_name(option: str) -> str:
    """An option's name without dashes in front, with underscores, in lower case."""
    return option.lstrip("-+").replace("-", "_").lower()


def given_options(argv: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Options on the command line with the word that is their value, if they have one: `--name 8`,
    `--name=8`, and `name=8` as Hydra and torchtune take it."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            if equals:
                yield name, value
            elif index + 1 < len(argv):
                yield name, argv[index + 1]
        elif equals and name.replace(".", "_").lstrip("+").isidentifier():
            yield name, value


def declared_options(program: ScriptTarget) -> Iterator[Declared]:
    """Options that the source declares, in its order."""
    yield from _declared_in(_source(program))


@lru_cache(maxsize=1)
def _declared_in(source: bytes) -> tuple[Declared, ...]:
    """Kept, for the combinations of a sweep are asked about one by one."""
    return tuple(_read_off(_parsed(source)))


def _read_off(tree: ast.Module) -> Iterator[Declared]:
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Call):
            names = [word for word in _texts(node) if word.startswith("-")]
            if names:
                yield Declared(names, _default(node))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    if used & _HF_PARSERS:
        yield from _fields(nodes)
        if any(name.endswith("TrainingArguments") for name in used):
            for name, value in _HF_DEFAULTS.items():
                yield Declared([f"--{name}"], value)


def _fields(nodes: list[ast.AST]) -> Iterator[Declared]:
    """Annotated fields of classes: `block_size: int = field(default=1024)`."""
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = field.value
                default = _default(value) if isinstance(value, ast.Call) else _whole(value)
                yield Declared([f"--{field.target.id}"], default)


def _default(call: ast.Call) -> int:
    return next((_whole(word.value) for word in call.keywords if word.arg == "default"), 0)


def _whole(node: ast.expr | None) -> int:
    """The number that a constant expression is; 0 for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return max(node.value, 0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _whole(node.left) * _whole(node.right)
    return 0


def _source(program: ScriptTarget) -> bytes:
    """Nothing where it cannot be read."""
    path = Path(program.name) if program.kind == "script" else _module_file(program.name)
    try:
        if path is None or path.stat().st_size > _MOST_BYTES:
            return b""
        return path.read_bytes()
    except (OSError, ValueError):
        return b""


def _parsed(source: bytes) -> ast.Module:
    """An empty one of what is no Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def top_spec(module: str) -> ModuleSpec | None:
    """Of the top level of a dotted name, as `python -m` looks for it: to find a submodule would
    import its parents."""
    top = module.partition(".")[0]
    before = sys.path
    sys.path = ["", *before]
    try:
        return importlib.util.find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        return None
    finally:
        sys.path = before


def _module_file(name: str) -> Path | None:
    """The source file that `python -m name` runs."""
    rest, spec = name.split(".")[1:], top_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin and not rest else None
    for folder in spec.submodule_search_locations:
        base = Path(folder, *rest)
        for path in (base.with_suffix(".py"), base / "__main__.py"):
            if path.is_file() and (rest or path.name == "__main__.py"):
                return path
    return None


def find_value(program: ScriptTarget, names: frozenset[str]) -> NumericOption | None:
    """The option of one of these names, a dotted name by its last part, and the whole number that
    it has: the last on the command line, there also under a shorter name that the source declares
    for it, else the source's default. 0 where that is not known."""

    def named(option: str) -> bool:
        return plain_name(option).rpartition(".")[2] in names

    declared = [one for one in declared_options(program) if any(map(named, one.names))]
    aliases = {option for one in declared for option in one.names}
    for option, text in reversed(list(given_options(program.argv))):
        if (option in aliases or named(option)) and text.isdecimal():
            return NumericOption(option, int(text))
    if declared:
        return NumericOption(declared[0].longest, declared[0].default)
    return None


@dataclass(frozen=True)
class Switch:
    """An option that is on or off."""

    flag: str
    """What turns it on; empty for one that only a flag turns off."""
    off: str
    """What turns it off; empty for one that only a flag turns on."""

    def on(self, program: ScriptTarget) -> ScriptTarget:
        program = program.without_flag(self.off) if self.off else program
        return program.with_flag(self.flag) if self.flag else program

    def words(self, *, on: bool) -> str:
        yes, no = self.flag or f"without {self.off}", self.off or f"without {self.flag}"
        return yes if on else no


def find_switches(program: ScriptTarget, names: frozenset[str]) -> Iterator[Switch]:
    """Switches among the given names that are off, as `argparse` declares them: `store_true`,
    `store_false`, `BooleanOptionalAction`."""
    for call in calls(program):
        flag = next((word for word in _texts(call) if word.startswith("--")), "")
        words = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
        action = words.get("action", "").rpartition(".")[2].strip("'")
        switch = _switch(flag, action)
        if switch is None or plain_name(flag).removeprefix("no_") not in names:
            continue
        given = [word for word in program.argv if word in (switch.flag, switch.off)]
        starts_on = not switch.flag or words.get("default") == "True"
        if not (given[-1] == switch.flag if given else starts_on):
            yield switch


def calls(program: ScriptTarget) -> Iterator[ast.Call]:
    """All of the source."""
    for node in ast.walk(_parsed(_source(program))):
        if isinstance(node, ast.Call):
            yield node


def _switch(flag: str, action: str) -> Switch | None:
    """None for an option that takes a value."""
    if action == "BooleanOptionalAction":
        return Switch(flag, f"--no-{flag.lstrip('-')}")
    if action in ("store_true", "store_false"):
        turns_off = action == "store_false" or plain_name(flag).startswith("no_")
        return Switch("", flag) if turns_off else Switch(flag, "")
    return None


def _texts(call: ast.Call) -> list[str]:
    return [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
