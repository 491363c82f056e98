"""The combinations of a sweep as jobs: each value put where the command has its option."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from memplan.capturing.options import ScriptTarget
from memplan.cli.job import read_job
from memplan.cli.launchers.launch import Launch, World
from memplan.cli.launchers.read import read_launch
from memplan.fit.option_choice import option_to_vary, unknown_option
from memplan.fit.options import plain_name
from memplan.sweep.grid import (
    Dimension,
    changed_words,
    combinations,
)
from memplan.sweep.run import Cell
from memplan.sweep.samples import Samples
from memplan.types.device import DeviceProfile
from memplan.types.errors import UsageError
from memplan.worker.request import Question

_PASSED_ON = ("--steps", "--routing", "--alloc-conf", "--world-size", "--gpus-per-node", "--scan")
_FLAGS = ("--allow-network", "--whole-run")

Change = Callable[[Launch, str], Launch]
"""A command's launchers and program with a value of an option; only words are right in it."""


def cells_of(
    args: argparse.Namespace,
    profiles: dict[str, DeviceProfile],
    dimensions: Sequence[Dimension],
    most: int,
    usage: str,
) -> list[Cell]:
    """Every combination. Raises UsageError for a command that cannot be read as it is, and for an
    option that it does not have."""
    grid = combinations(list(profiles), dimensions, most)
    base = read_job(args, usage).launch
    changes = [_find(base, args.gpus_per_node, one) for one in dimensions]
    _refuse_same(base, dimensions, changes)
    cells = []
    for gpu, values in grid:
        launch = base
        for change, value in zip(changes, values, strict=True):
            launch = change(launch, value)
        named = {one.name: value for one, value in zip(dimensions, values, strict=True)}
        cells.append(_cell(args, profiles[gpu], gpu, named, launch.words(), usage))
    return cells


def _refuse_same(base: Launch, dimensions: Sequence[Dimension], changes: Sequence[Change]) -> None:
    """Raises UsageError for two names of one option, whose values would replace one another."""
    found: dict[tuple[str, ...], str] = {}
    for one, change in zip(dimensions, changes, strict=True):
        other = found.setdefault(tuple(change(base, "1").words()), one.name)
        if other != one.name:
            raise UsageError(
                f"--vary {other} and --vary {one.name} are the same option of the command",
                f"--vary {other}=… with all values",
            )


def _cell(
    args: argparse.Namespace,
    profile: DeviceProfile,
    gpu: str,
    values: dict[str, str],
    words: list[str],
    usage: str,
) -> Cell:
    asked = copy.copy(args)
    asked.program = ScriptTarget.of(words)
    try:
        job = read_job(asked, usage)
    except UsageError as error:
        return Cell(gpu, values, words, refused=error)
    ranks = job.world.size if job.world is not None else 1

    def question(rank: int | None) -> Question:
        return job.question(asked, profile, rank=rank)

    return Cell(
        gpu,
        values,
        words,
        question=question,
        ranks=ranks if job.rank is None else None,
        samples=Samples.of(job.launch.target, ranks),
        fit_words=(*_passed_on(args, gpu, profile), *words) if args.fit else (),
    )


def _passed_on(args: argparse.Namespace, gpu: str, profile: DeviceProfile) -> Iterator[str]:
    yield from ("--gpu", gpu)
    if args.calibration is not None and profile.kernels:
        yield from ("--calibration", str(Path(args.calibration).absolute()))
    for option in _PASSED_ON:
        value = getattr(args, plain_name(option))
        if value is not None:
            yield from (option, str(value))
    for option in _FLAGS:
        if getattr(args, plain_name(option)):
            yield option
    for package in args.packages:
        yield from ("--with", package)


def _find(launch: Launch, gpus_per_node: int | None, dimension: Dimension) -> Change:
    """How a value of the option is put into the command. Raises UsageError where it has none."""
    wanted = plain_name(dimension.name)
    given = [word.partition("=")[0] for word in launch.before if word.startswith("-")]
    spelled = next((word for word in reversed(given) if plain_name(word) == wanted), None)
    if spelled is not None:
        return _changing(spelled)
    found = option_to_vary(launch.target, dimension.name)
    if found is not None:
        return lambda now, value: replace(now, target=now.target.with_option(found, value))
    for place, option in product(range(len(launch.before)), _spellings(dimension.name)):
        jobs = {
            value: _job(_inserted(launch.before, place, option, value), launch, gpus_per_node)
            for value in dimension.values
        }
        if not any(jobs.values()):
            continue
        for value, job in jobs.items():
            if job is None:
                continue
            # The last of an option's values counts: where this one does not, it is given already.
            at_end = (
                _job(_inserted(launch.before, at, option, value), launch, gpus_per_node)
                for at in reversed(range(len(launch.before)))
            )
            last = next(found for found in at_end if found is not None)
            if last == job:
                continue
            for other in given:
                changed = changed_words(launch.before, other, value)
                if _job(changed, launch, gpus_per_node) == last:
                    return _changing(other)
            raise UsageError(
                f"--vary {dimension.name}: {launch.before[place]} has it under another spelling",
                f"{option} in the command, with a space before its value",
            )
        # Later changes move words: the launcher is found again, by what stands before it.
        return _inserting(launch.before[place], option)
    raise unknown_option(launch.target, "--vary", dimension.name)


def _spellings(name: str) -> list[str]:
    plain = plain_name(name)
    if len(plain) == 1:
        return [f"-{name.lstrip('-')}"]
    return [f"--{plain.replace('_', '-')}", f"--{plain}"]


def _changing(option: str) -> Change:
    return lambda now, value: replace(now, before=changed_words(now.before, option, value))


def _inserting(launcher: str, option: str) -> Change:
    def change(now: Launch, value: str) -> Launch:
        place = now.before.index(launcher)
        return replace(now, before=_inserted(now.before, place, option, value))

    return change


def _inserted(before: tuple[str, ...], place: int, option: str, value: str) -> tuple[str, ...]:
    return (*before[: place + 1], option, value, *before[place + 1 :])


def _job(
    before: tuple[str, ...], launch: Launch, gpus_per_node: int | None
) -> tuple[World | None, dict[str, str]] | None:
    """What other words make of the launchers: the ranks, and what the first one finds. None where
    they are refused or leave another program."""
    words = [*before, launch.target.name, *launch.target.argv]
    try:
        found = read_launch(ScriptTarget.of(words), gpus_per_node)
    except UsageError:
        return None
    if found.target != launch.target:
        return None
    return found.world, found.environment(found.world.place(0) if found.world else None)
