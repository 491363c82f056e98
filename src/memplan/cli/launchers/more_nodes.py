"""A launcher's command with more nodes: its counts multiplied, and the command read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from memplan.capturing.options import ScriptTarget
from memplan.cli.launchers.launch import Launch, World
from memplan.cli.launchers.read import read_launch
from memplan.types.errors import UsageError

_TORCHRUN = ("--nnodes",)
_ACCELERATE = ("--num_machines", "--num_processes")
_MPIRUN = ("-np", "--np", "-n", "--n")
_COUNTS: dict[str, tuple[str, ...]] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "accelerate-launch": _ACCELERATE,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed": ("--num_nodes",),
    "srun": ("-N", "--nodes", "-n", "--ntasks"),
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
}
"""Options that count nodes, or processes of all nodes together."""
_ONE_NODE = "--standalone"


def with_more_nodes(launch: Launch, times: int, gpus_per_node: int | None = None) -> Launch | None:
    """The same program on `times` as many nodes with as many processes each; None where no count
    in the command comes to that."""
    if launch.world is None:
        return None
    wanted = World(launch.world.size * times, launch.world.local_size)
    for nodes in ((), ("--nnodes", str(times))):
        words = [*_multiplied(launch.before, times, nodes), launch.target.name, *launch.target.argv]
        try:
            found = read_launch(ScriptTarget.of(words), gpus_per_node)
        except UsageError:
            continue
        if found.world == wanted and found.target == launch.target:
            return found
    return None


def _multiplied(before: tuple[str, ...], times: int, nodes: tuple[str, ...]) -> Iterator[str]:
    """`nodes`: what torchrun is given, where it has no count."""
    counts: tuple[str, ...] = ()
    is_count = False
    for word in before:
        name = Path(word).name
        option, equals, value = word.partition("=")
        if is_count and word.isdecimal():
            yield str(int(word) * times)
        elif name in _COUNTS:
            counts = _COUNTS[name]
            yield from (word, *(nodes if counts is _TORCHRUN else ()))
        elif equals and _spelling(option) in counts and value.isdecimal():
            yield f"{option}={int(value) * times}"
        elif not (word == _ONE_NODE and counts is _TORCHRUN):
            yield word
        is_count = _spelling(word) in counts


def _spelling(option: str) -> str:
    """`--num-nodes` is `--num_nodes`, and `-n` is not `--n`."""
    return option[:2] + option[2:].replace("-", "_")
