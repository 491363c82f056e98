"""A command line's program, with the launchers before it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from shutil import which

from memplan.capturing.options import ScriptTarget
from memplan.cli.launchers.accelerate import read_accelerate, read_accelerate_launch
from memplan.cli.launchers.context import Context, Reader, Step
from memplan.cli.launchers.deepspeed import read_deepspeed
from memplan.cli.launchers.launch import Launch, Layer, innermost
from memplan.cli.launchers.mpirun import read_mpirun
from memplan.cli.launchers.python import (
    PYTHON_NAME,
    assignments,
    is_assignment,
    read_env,
    read_python,
)
from memplan.cli.launchers.srun import read_srun
from memplan.cli.launchers.torchrun import read_launch_module, read_torchrun
from memplan.types.errors import UsageError


def _read_prefix(name: str, words: list[str], _context: Context) -> Step:
    """What stands behind a prefix, from the first word on that begins a command."""
    before = [name, *words]
    begins = (place for place, word in enumerate(words) if _begins(word, before[place]))
    begin = next(begins, len(words))
    return Step(Layer(name, module_option=""), command=words[begin:])


def _begins(word: str, before: str) -> bool:
    """Whether a word begins a command, known or not. A prefix's own words are options, what looks
    like a number, and what follows an option (`ionice -c idle`)."""
    name = Path(word).name
    known = name in (*_READERS, *_SHELLS, *_SURROUNDINGS) or PYTHON_NAME.fullmatch(name)
    own = word.startswith("-") or before.startswith("-") or _NUMBER.fullmatch(word)
    program = name.endswith(".py") or (which(word) and before != "-c")  # IDLE, Python's editor
    return bool(known or program or not own)


_NUMBER = re.compile(r"[+!]?[0-9a-fA-Fx.,:-]+[smhd]?")
"""A number, a mask of processors, a list of them or a duration."""
_PREFIXES = ("nohup", "time", "nice", "ionice", "numactl", "taskset", "stdbuf", "timeout", "setsid",
             "chrt")  # fmt: skip
"""Commands that change how the one behind them runs, not what: their words have no say in memory.
"""
_READERS: dict[str, Reader] = {
    **{name: partial(_read_prefix, name) for name in _PREFIXES},
    "torchrun": read_torchrun,
    "accelerate": read_accelerate,
    "accelerate-launch": read_accelerate_launch,
    "deepspeed": read_deepspeed,
    "srun": read_srun,
    "mpirun": read_mpirun,
    "mpiexec": read_mpirun,
    "env": read_env,
}
_MODULES: dict[str, Reader] = {
    "torch.distributed.run": read_torchrun,
    "torch.distributed.launch": read_launch_module,
    "accelerate.commands.launch": read_accelerate_launch,
    "accelerate.commands.accelerate_cli": read_accelerate,
    "deepspeed.launcher.runner": read_deepspeed,
}
_SHELLS = ("bash", "sh", "zsh", "dash")
_SURROUNDINGS = ("uv", "poetry", "pdm", "pixi", "hatch", "conda", "mamba", "micromamba", "docker",
                 "podman", "apptainer", "singularity")  # fmt: skip
"""What runs a command in another Python's surroundings than these."""


def read_launch(program: ScriptTarget, gpus_per_node: int | None = None) -> Launch:
    """The program as its launchers start it; one without a launcher is itself.

    `gpus_per_node`: where the launcher counts GPUs or does not say how many processes a node gets.
    Raises UsageError for words that the launcher would refuse, for what cannot be known or followed
    here, and for launchers that contradict each other.
    """
    words = [program.name, *program.argv]
    if program.kind == "module":
        reader, rest = _MODULES.get(program.name), words[1:]
    else:
        reader, rest = _reader_of(words)
    layers: list[Layer] = []
    target = program
    while reader is not None:
        step = reader(rest, Context(gpus_per_node, _environment(layers)))
        layers.append(step.layer)
        following = step.program if step.program is not None else step.command
        if not following:
            raise _no_script(step.layer.launcher)
        target = ScriptTarget(
            "module" if step.is_module else "script", following[0], tuple(following[1:])
        )
        if step.program is None:
            reader, rest = _reader_of(following)
        else:
            reader = _MODULES.get(target.name) if step.is_module else None
            rest = following[1:]
    own = ["-m"] if program.kind == "module" else []
    length = len(own) + len(words) - 1 - len(target.argv)
    return Launch(target, tuple(layers), tuple([*own, *words][:length]), innermost(tuple(layers)))


def _reader_of(words: list[str]) -> tuple[Reader | None, list[str]]:
    """The reader of a command's first word, and the words that are for it."""
    if is_assignment(words[0]) and not Path(words[0]).exists():
        return lambda words, _context: assignments(words), words
    name = Path(words[0]).name
    if words[0] == f"./{name}":
        return None, words[1:]  # a script of that name
    if name in _SHELLS and not Path(words[0]).is_file():
        raise UsageError(
            f"{name}: what a shell would run cannot be followed", "the command that the shell runs"
        )
    if name in _SURROUNDINGS and words[1:2] in (["run"], ["exec"]):
        raise UsageError(
            f"{name} {words[1]} brings a Python of its own, which cannot be followed from here",
            f"memplan inside it: {name} {words[1]} … memplan estimate … train.py",
        )
    reader = read_python if PYTHON_NAME.fullmatch(name) else _READERS.get(name)
    return reader, words[1:]


def _no_script(launcher: str) -> UsageError:
    return UsageError(f"{launcher}: no script given", f"{launcher} … train.py")


def _environment(layers: list[Layer]) -> dict[str, str]:
    """What a launcher further in finds, as far as it is the same for every process."""
    found: dict[str, str] = {}
    for layer in layers:
        found |= layer.fixed
    return found
