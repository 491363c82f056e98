"""The job that a command line describes: the program, its launchers, and the rank that is meant."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace

from memplan.capturing.options import CaptureOptions, RankPlace
from memplan.cli.command import positive, positive_seconds, whole
from memplan.cli.launchers.by_hand import world_by_hand
from memplan.cli.launchers.context import MOST_GPUS_PER_NODE
from memplan.cli.launchers.launch import Launch, World
from memplan.cli.launchers.more_nodes import with_more_nodes
from memplan.cli.launchers.read import read_launch
from memplan.cli.machine import visible_gpus
from memplan.cli.program import check_program
from memplan.types.device import DEFAULT_PROFILE, DeviceProfile, find_profile
from memplan.types.errors import UsageError
from memplan.types.plan import Plan
from memplan.worker.perform import extend_path
from memplan.worker.request import CaptureRequest, Question

ALL_RANKS = "all"
_SCAN_SECONDS = 60.0
MOST_LOCAL = 16
"""Processes of a node that a capture can tell apart: `MAX_DEVICES` of `capturing/cuda/device.py`,
which cannot be asked without importing torch."""


@dataclass(frozen=True)
class Job:
    """A program, the processes it runs as, and the one in question.

    Attributes:
        launch: the program with its launchers.
        world: the ranks; None for a job of one process that no launcher started.
        rank: the rank to capture, 0 without a world; None for all that can differ.
        notes: sentences for a person about how the command was read.
    """

    launch: Launch
    world: World | None
    rank: int | None
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> RankPlace | None:
        """The process in question; the first where all are."""
        if self.world is None:
            return None
        place = self.world.place(self.rank or 0)
        if "CUDA_VISIBLE_DEVICES" in self.launch.environment(place):
            return place  # the launcher's word, for this process alone
        gpus = visible_gpus(os.environ)
        return replace(place, gpus=min(gpus, MOST_LOCAL) if gpus else None)

    @property
    def environment(self) -> dict[str, str]:
        return self.launch.environment(self.place)

    def with_more_nodes(self, times: int, gpus_per_node: int | None) -> Job | None:
        """The same job on `times` as many nodes; None for one that cannot be started so."""
        if self.world is None:
            return None
        if self.launch.world is None:
            return replace(self, world=World(self.world.size * times, self.world.local_size))
        launch = with_more_nodes(self.launch, times, gpus_per_node)
        return None if launch is None else replace(self, launch=launch, world=launch.world)

    def question(
        self,
        args: argparse.Namespace,
        profile: DeviceProfile | None,
        *,
        rank: int | None = None,
        plan: Plan | None = None,
    ) -> Question:
        """About the process in question, or that of `rank`, as the options of a command ask it."""
        job = self if rank is None else replace(self, rank=rank)
        options = CaptureOptions(
            profile=profile or find_profile(DEFAULT_PROFILE),
            steps=args.steps,
            scan_seconds=_scan_seconds(args),
            routing=args.routing,
            allow_network=args.allow_network,
            packages=tuple(args.packages),
            place=job.place,
            environment=job.environment,
        )
        request = CaptureRequest(
            program=self.launch.target,
            launcher_arguments=self.launch.arguments(job.place),
            options=options,
            alloc_conf=args.alloc_conf or "",
            plan=plan,
        )
        of_one_gpu = () if self.world else _of_one_gpu(self.launch)
        return Question(request, profile, (*self.launch.notes, *of_one_gpu))


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that capture a job, whichever way they look at it."""
    add_job_options(parser, several_ranks=True)
    add = parser.add_argument
    add("--alloc-conf", metavar="CONF", help="as PYTORCH_ALLOC_CONF; its keys win")
    add("--whole-run", action="store_true",
        help="read the data loader ahead, and capture its largest batches too")  # fmt: skip
    add("--scan", type=positive_seconds, metavar="SECONDS",
        help=f"with --whole-run: for reading ahead ({_SCAN_SECONDS:.0f})")  # fmt: skip
    add_packages_option(parser)
    add("-m", metavar="MODULE", help="run a module instead of a script")


def add_job_options(parser: argparse.ArgumentParser, *, several_ranks: bool) -> None:
    """What is assumed of a job, and which of its ranks is meant; `several_ranks`: whether all of
    them may be."""
    add = parser.add_argument
    add("--routing", choices=("balanced", "worst"), default="balanced",
        help="how data-dependent shapes (mixture of experts) are assumed")  # fmt: skip
    add("--allow-network", action="store_true", help="let the script use the network")
    add("--world-size", type=positive, metavar="N", help="the script runs as one of N ranks")
    add("--gpus-per-node", type=positive, metavar="N",
        help="ranks on each node (8, or all if there are fewer)")  # fmt: skip
    which = "the rank to capture" + (", or all that can differ" if several_ranks else " (0)")
    add("--rank", type=_rank, help=which, metavar="N|all" if several_ranks else "N")


def _scan_seconds(args: argparse.Namespace) -> float:
    if not args.whole_run:
        if args.scan is not None:
            raise UsageError("--scan without --whole-run", f"--whole-run --scan {args.scan:g}")
        return 0.0
    if args.steps is not None:
        raise UsageError("--whole-run and --steps contradict each other", "leave one of them out")
    return args.scan or _SCAN_SECONDS


def add_packages_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with", dest="packages", metavar="PACKAGE|RULES.py", action="append", default=[],
        help="a package that only the GPU machine has, or a file of rules")  # fmt: skip


def read_job(args: argparse.Namespace, usage: str) -> Job:
    """Raises UsageError for a program that is not there, and for ranks that do not exist or that
    contradict the launcher."""
    if args.program is None:
        raise UsageError("no script given", usage)
    launch = read_launch(args.program, args.gpus_per_node)
    extend_path(launch.environment(None))
    check_program(launch.target, usage)
    world = _world(args, launch)
    if world is not None:
        # A launcher's command asks about the whole job, --world-size about a rank of it.
        return _job_of_ranks(args.rank, launch, world, ALL_RANKS if launch.world else 0)
    by_hand = world_by_hand(os.environ | launch.environment(None), args.gpus_per_node)
    if by_hand is None:
        _refuse_rank_options(args)
        return Job(launch, None, 0, (*launch.notes, *_of_one_gpu(launch)))
    world, rank = by_hand
    note = f"RANK={rank} WORLD_SIZE={world.size} of the environment, nodes of {world.local_size}"
    return _job_of_ranks(args.rank, launch, world, rank, note)


def _job_of_ranks(
    asked: int | str | None, launch: Launch, world: World, usual: int | str, *said: str
) -> Job:
    if world.local_size > MOST_LOCAL:
        raise UsageError(
            f"{world}: at most {MOST_LOCAL} processes in a node can be captured",
            f"count the machine's operating systems as nodes, {MOST_LOCAL} GPUs each at most",
        )
    notes = (*launch.notes, *said)
    rank = usual if asked is None else asked
    if isinstance(rank, str):  # all
        return Job(launch, world, None if world.size > 1 else 0, notes)
    number = world.place(rank).rank
    if asked is None and world.size > 1:
        notes += (_only_one(number, world.size),)
    return Job(launch, world, number, notes)


def _only_one(rank: int, size: int) -> str:
    """What an answer about a single rank leaves open."""
    return (
        f"rank {rank} alone of {size} was captured; --rank all captures those that can differ, "
        f"--rank {size // 2 if rank != size // 2 else 0} another"
    )


def _of_one_gpu(launch: Launch) -> list[str]:
    """What a job of one process makes of CUDA_VISIBLE_DEVICES, where that is not one GPU."""
    around = os.environ | launch.environment(None)
    named = around.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_gpus(around)
    if named is None or gpus == 1:
        return []
    has = f"names {gpus} GPUs" if gpus else "hides every GPU"
    return [f"CUDA_VISIBLE_DEVICES={named} {has}; the script was captured with one"]


def _world(args: argparse.Namespace, launch: Launch) -> World | None:
    size, per_node = args.world_size, args.gpus_per_node
    if launch.world is not None:
        return _agreed(launch.world, size, per_node, _launchers(launch))
    if size is None:
        return None
    local = min(per_node or MOST_GPUS_PER_NODE, size)
    if size % local:
        fitting = max(n for n in range(1, local) if size % n == 0)
        raise UsageError(
            f"--world-size {size} does not divide into nodes of {local} GPUs",
            f"--world-size {size} --gpus-per-node {fitting}",
        )
    return World(size, local)


def _refuse_rank_options(args: argparse.Namespace) -> None:
    for option, value in (("--rank", args.rank), ("--gpus-per-node", args.gpus_per_node)):
        if value is not None and (option, value) != ("--gpus-per-node", 1):
            raise UsageError(
                f"{option} {value} of a job of one process",
                f"--world-size 8 {option} {value}, or the launcher before the script",
            )


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


def _rank(text: str) -> int | str:
    return text if text == ALL_RANKS else whole(text, "the number of a rank")
