"""`accelerate launch`, read by accelerate itself: most of what it hands to a job comes from its
settings file and from defaults that change with its versions.

That happens in a process of its own (`accelerate_reader`): importing accelerate brings torch, and
reading asks torch for devices, which must not happen before a capture.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import msgspec

from memplan.cli.launchers.context import Context, Step
from memplan.cli.launchers.launch import Layer, World
from memplan.cli.launchers.torchrun import agent_environment, ranked_environment
from memplan.types.errors import InternalError, UsageError

_READER = "memplan.cli.launchers.accelerate_reader"


class Question(msgspec.Struct):
    """What the reader is asked."""

    words: list[str]
    gpus_per_node: int | None


class Reading(msgspec.Struct):
    """What the reader answers: an error and what to try, or the rest."""

    error: str = ""
    hint: str = ""
    program: list[str] = []
    is_module: bool = False
    is_command: bool = False
    """Whether --no_python is given: then the program need not be Python."""
    processes: int = 0
    """0: the program is started once and told nothing of ranks."""
    machines: int = 1
    role: str = "default"
    environment: dict[str, str] = {}
    settings: str = ""
    """The settings file that was used."""


def read_accelerate(words: list[str], context: Context) -> Step:
    if not words or words[0] != "launch":
        said = f"accelerate {words[0]}" if words else "accelerate"
        raise UsageError(f"{said} starts no training", "accelerate launch train.py")
    return read_accelerate_launch(words[1:], context)


def read_accelerate_launch(words: list[str], context: Context) -> Step:
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError(
            "accelerate launch: the package accelerate is not installed beside memplan",
            f"{sys.executable} -m pip install accelerate",
        )
    reading = _ask(words, context)
    if reading.error:
        raise UsageError(f"accelerate launch: {reading.error}", reading.hint)
    environment = dict(reading.environment)
    world = None
    if reading.processes:
        if reading.processes % reading.machines:
            raise UsageError(
                f"accelerate launch: {reading.processes} processes do not divide into "
                f"{reading.machines} machines",
                f"--num_processes {reading.machines * 8}",
            )
        world = World(reading.processes, reading.processes // reading.machines)
        threads = environment.get("OMP_NUM_THREADS") or context.variable("OMP_NUM_THREADS")
        environment = agent_environment(world, threads, reading.role) | environment
    layer = Layer(
        "accelerate launch",
        world,
        fixed=environment,
        ranked=ranked_environment() if world else None,
        notes=_notes(reading),
    )
    if reading.is_command:
        return Step(layer, command=reading.program)
    return Step(layer, program=reading.program, is_module=reading.is_module)


def _ask(words: list[str], context: Context) -> Reading:
    asked = subprocess.run(
        [sys.executable, "-P", "-m", _READER],
        input=msgspec.json.encode(Question(words, context.gpus_per_node)),
        capture_output=True,
        env={**os.environ, **context.environment},
        check=False,
    )
    try:
        # accelerate may print too; the answer is the last line.
        return msgspec.json.decode(asked.stdout.splitlines()[-1], type=Reading)
    except (IndexError, msgspec.DecodeError) as error:
        said = asked.stderr.decode(errors="replace").strip().splitlines()
        raise InternalError(
            f"accelerate launch could not be read: {said[-1] if said else asked.returncode}",
            "torchrun --nproc-per-node 8 train.py in its place",
        ) from error


def _notes(reading: Reading) -> tuple[str, ...]:
    if not reading.settings:
        return ()
    return (f"accelerate launch: settings from {reading.settings}",)
