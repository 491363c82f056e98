"""The job that a command line describes: the program, its launchers, and the rank that is meant."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from memplan.capture.options import RankPlace, ScriptTarget
from memplan.cli.launchers.context import MOST_GPUS_PER_NODE
from memplan.cli.launchers.launch import Launch, World
from memplan.cli.launchers.read import read_launch
from memplan.cli.program import check_program
from memplan.types.errors import UsageError

ALL_RANKS = "all"


@dataclass(frozen=True)
class Job:
    """A program, the processes it runs as, and the one in question.

    Attributes:
        launch: the program with its launchers.
        world: the ranks; None for a job of one process that no launcher started.
        rank: the rank to capture, 0 without a world; None for all that can differ.
    """

    launch: Launch
    world: World | None
    rank: int | None

    @property
    def place(self) -> RankPlace | None:
        """The process in question; the first where all are."""
        return self.world.place(self.rank or 0) if self.world else None

    @property
    def target(self) -> ScriptTarget:
        return self.launch.target_at(self.place)

    @property
    def environment(self) -> dict[str, str]:
        return self.launch.environment(self.place)

    def rank_options(self) -> list[str]:
        """The options that describe the ranks, for a command line with the same launchers."""
        if self.world is None:
            return []
        return [
            *("--world-size", str(self.world.size)),
            *("--gpus-per-node", str(self.world.local_size)),
        ]


def add_rank_options(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Options for the ranks of a job; `several`: whether all of them may be asked for."""
    add = parser.add_argument
    add("--world-size", type=_positive, metavar="N", help="the script runs as one of N ranks")
    add("--gpus-per-node", type=_positive, metavar="N",
        help="ranks on each node (8, or all if there are fewer)")  # fmt: skip
    which = "the rank to capture" + (", or all that can differ" if several else "")
    add("--rank", type=_rank if several else _whole, help=which,
        metavar="N|all" if several else "N")  # fmt: skip


def read_job(args: argparse.Namespace, usage: str) -> Job:
    """Raises UsageError for a program that is not there, and for ranks that do not exist or that
    contradict the launcher."""
    if args.program is None:
        raise UsageError("no script given", usage)
    launch = read_launch(args.program, args.gpus_per_node)
    _extend_path(launch)
    check_program(launch.target, usage)
    world = _world(args, launch)
    if world is None:
        return Job(launch, None, 0)
    rank = args.rank
    if rank is None:
        # A launcher's command asks about the whole job, --world-size about a rank of it.
        rank = ALL_RANKS if launch.world and world.size > 1 else 0
    if rank == ALL_RANKS:
        return Job(launch, world, None if world.size > 1 else 0)
    return Job(launch, world, world.place(rank).rank)


def _extend_path(launch: Launch) -> None:
    """This process has started already: what PYTHONPATH would have done is done here."""
    folders = launch.environment(None).get("PYTHONPATH", "").split(os.pathsep)
    found = [str(Path(folder).absolute()) for folder in folders if folder]
    sys.path[:0] = [folder for folder in found if folder not in sys.path]


def _world(args: argparse.Namespace, launch: Launch) -> World | None:
    size, per_node = args.world_size, args.gpus_per_node
    if launch.world is not None:
        return _agreed(launch.world, size, per_node, _launchers(launch))
    if size is None:
        for option, value in (("--rank", args.rank), ("--gpus-per-node", per_node)):
            if value is not None:
                raise UsageError(
                    f"{option} {value} of a job of one process",
                    f"--world-size 8 {option} {value}, or the launcher before the script",
                )
        return None
    local = min(per_node or MOST_GPUS_PER_NODE, size)
    if size % local:
        fitting = max(n for n in range(1, local) if size % n == 0)
        raise UsageError(
            f"--world-size {size} does not divide into nodes of {local} GPUs",
            f"--world-size {size} --gpus-per-node {fitting}",
        )
    return World(size, local)


def _agreed(world: World, size: int | None, per_node: int | None, launchers: str) -> World:
    if size is not None and size != world.size:
        raise UsageError(
            f"--world-size {size}, but {launchers} starts {world}", "leave --world-size out"
        )
    if per_node is not None and min(per_node, world.size) != world.local_size:
        raise UsageError(
            f"--gpus-per-node {per_node}, but {launchers} starts {world}",
            "leave --gpus-per-node out",
        )
    return world


def _launchers(launch: Launch) -> str:
    return " ".join(layer.launcher for layer in launch.layers if layer.world is not None)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a rank")
    return int(text)


def _rank(text: str) -> int | str:
    return text if text == ALL_RANKS else _whole(text)
