"""The options of a script that decide how much memory a step needs: batch size, sequence length.

Nothing of the script is run: its command line is read, and its source is parsed for calls that
declare options (`add_argument("--batch-size", default=8)`, click's `option`) and, where Hugging
Face's `HfArgumentParser` makes options of them, for fields of dataclasses.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from memplan.capture.options import ScriptTarget

Kind = Literal["batch_size", "sequence_length"]
_MOST_BYTES = 4 << 20
_NAMES: dict[Kind, str] = {
    "batch_size": (
        "batch batch_size bs bsz mbs train_batch train_batch_size batch_size_train"
        " per_device_train_batch_size per_device_batch_size device_batch_size local_batch_size"
        " micro_batch micro_batch_size microbatch_size per_gpu_train_batch_size samples_per_gpu"
    ),
    "sequence_length": (
        "seq_len seq_length seqlen seqlength sequence_length sequence_len block_size context"
        " context_length context_len context_size ctx_len n_ctx length max_length max_len"
        " max_seq_len max_seq_length max_sequence_length model_max_length cutoff_len"
    ),
}
_HF_DEFAULTS = {"per_device_train_batch_size": 8}
"""Of `transformers.TrainingArguments`."""
_HF_PARSERS = frozenset({"HfArgumentParser", "TrlParser"})


@dataclass(frozen=True)
class Knob:
    """An option and the value in force."""

    kind: Kind
    option: str
    """As typed: `--batch-size`."""
    value: int


def find_knobs(program: ScriptTarget) -> list[Knob]:
    """At most one of each kind, the batch size first: one given on the command line, else the
    first that the source declares with a whole number above 0 as its default."""
    declared = list(_declared(program))
    aliases = {option: knob for names, knob in declared for option in names}
    found: dict[Kind, Knob] = {}
    for option, text in _given(program.argv):
        kind = aliases[option].kind if option in aliases else _kind([option])
        if kind is not None and text.isdecimal() and int(text) > 0:
            found[kind] = Knob(kind, option, int(text))
    for _, knob in declared:
        if knob.value > 0:
            found.setdefault(knob.kind, knob)
    return [found[kind] for kind in _NAMES if kind in found]


def with_value(program: ScriptTarget, knob: Knob, value: int) -> ScriptTarget:
    """The program with another value of the option; it is appended where it was not given."""
    argv = list(program.argv)
    for index in range(len(argv) - 1, -1, -1):
        name, equals, _ = argv[index].partition("=")
        if name != knob.option:
            continue
        if equals:
            argv[index] = f"{name}={value}"
        elif index + 1 < len(argv):
            argv[index + 1] = str(value)
        return replace(program, argv=tuple(argv))
    return replace(program, argv=(*argv, knob.option, str(value)))


def _given(argv: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Options on the command line with the word that is their value, if they have one."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            continue
        if equals:
            yield name, value
        elif index + 1 < len(argv):
            yield name, argv[index + 1]


def _kind(options: list[str]) -> Kind | None:
    names = {option.lstrip("-").replace("-", "_").lower() for option in options}
    return next((kind for kind, known in _NAMES.items() if names & set(known.split())), None)


def _declared(program: ScriptTarget) -> Iterator[tuple[list[str], Knob]]:
    """Options that the source declares: all their names, and what they are. A value of 0 stands
    for one that the source does not say."""
    tree = _parsed(program)
    if tree is None:
        return
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Call):
            options = [
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            yield from _as_knob([o for o in options if o.startswith("-")], _default(node))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if names & _HF_PARSERS:
        yield from _fields(nodes)
        if any(name.endswith("TrainingArguments") for name in names):
            for name, value in _HF_DEFAULTS.items():
                yield from _as_knob([f"--{name}"], value)


def _fields(nodes: list[ast.AST]) -> Iterator[tuple[list[str], Knob]]:
    """Annotated fields of classes: `block_size: int = field(default=1024)`."""
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = field.value
                default = _default(value) if isinstance(value, ast.Call) else _whole(value)
                yield from _as_knob([f"--{field.target.id}"], default)


def _as_knob(options: list[str], value: int) -> Iterator[tuple[list[str], Knob]]:
    kind = _kind(options)
    if kind is not None:
        longest = max(options, key=len)
        yield options, Knob(kind, longest, value)


def _default(call: ast.Call) -> int:
    return next((_whole(word.value) for word in call.keywords if word.arg == "default"), 0)


def _whole(node: ast.expr | None) -> int:
    """The number that a constant expression is; 0 for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return max(node.value, 0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _whole(node.left) * _whole(node.right)
    return 0


def _parsed(program: ScriptTarget) -> ast.Module | None:
    path = Path(program.name) if program.kind == "script" else _module_file(program.name)
    try:
        if path is None or path.stat().st_size > _MOST_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _module_file(name: str) -> Path | None:
    """Where `python -m name` finds its source. Only the top level is looked up: finding a submodule
    would import its parents."""
    top, *rest = name.split(".")
    before = sys.path
    sys.path = ["", *before]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path = before
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
