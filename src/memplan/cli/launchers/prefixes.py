"""Commands that stand before another one and change how it runs, not what: `nohup`, `nice -n 10`,
`numactl --cpunodebind 0`, `time`, … Their options have no say in memory and are passed over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from memplan.cli.launchers.context import Context, Reader, Step
from memplan.cli.launchers.launch import Layer
from memplan.cli.launchers.options import OptionTable
from memplan.types.errors import UsageError


@dataclass(frozen=True)
class _Prefix:
    """One such command.

    Attributes:
        table: its options.
        words: how many words it takes besides, before the command: a mask, a duration.
        starts_nothing: options with which it runs no command.
    """

    table: OptionTable
    words: int = 0
    starts_nothing: tuple[str, ...] = ()


_PREFIXES = (
    _Prefix(OptionTable("nohup", values="", flags="")),
    _Prefix(
        OptionTable(
            "time",
            values="-f|--format -o|--output",
            flags="-p|--portability -v|--verbose -a|--append -q|--quiet",
        )
    ),
    _Prefix(OptionTable("nice", values="-n|--adjustment")),
    _Prefix(
        OptionTable(
            "ionice",
            values="-c|--class -n|--classdata -p|--pid -P|--pgid -u|--uid",
            flags="-t|--ignore",
        ),
        starts_nothing=("pid", "pgid", "uid"),
    ),
    _Prefix(
        OptionTable(
            "numactl",
            values="-i|--interleave -w|--weighted-interleave -N|--cpunodebind -C|--physcpubind"
            " -m|--membind -P|--preferred-many -p|--preferred -S|--shm -f|--file -L|--length"
            " -o|--offset -M|--shmmode -I|--shmid -x|--cpubind",
            flags="-a|--all -l|--localalloc -b|--balancing -t|--strict -s|--show -H|--hardware"
            " -d|--dump -D|--dump-nodes -T|--touch -V|--verify",
        ),
        starts_nothing=("show", "hardware"),
    ),
    _Prefix(
        OptionTable("taskset", values="", flags="-a|--all-tasks -c|--cpu-list -p|--pid"),
        words=1,
        starts_nothing=("pid",),
    ),
    _Prefix(OptionTable("stdbuf", values="-i|--input -o|--output -e|--error")),
    _Prefix(
        OptionTable(
            "timeout",
            values="-k|--kill-after -s|--signal",
            flags="-f|--foreground -p|--preserve-status -v|--verbose",
        ),
        words=1,
    ),
    _Prefix(OptionTable("setsid", values="", flags="-c|--ctty -f|--fork -w|--wait")),
    _Prefix(
        OptionTable(
            "chrt",
            values="-T|--sched-runtime -P|--sched-period -D|--sched-deadline",
            flags="-b|--batch -d|--deadline -f|--fifo -i|--idle -o|--other -r|--rr"
            " -R|--reset-on-fork -a|--all-tasks -v|--verbose -m|--max -p|--pid",
        ),
        words=1,
        starts_nothing=("pid", "max"),
    ),
)


def _reader(prefix: _Prefix) -> Reader:
    name = prefix.table.launcher

    def read(words: list[str], _context: Context) -> Step:
        if name == "nice" and words and re.fullmatch(r"--?\d+", words[0]):
            words = words[1:]  # `nice -10`, the old way
        given, rest = prefix.table.read(words)
        for option in prefix.starts_nothing:
            if option in given:
                raise UsageError(f"{name} --{option} starts no program", f"{name} … train.py")
        # Not the end of its words where the command is missing: that is said of all launchers.
        return Step(Layer(name, module_option=""), command=rest[prefix.words :])

    return read


PREFIXES: Mapping[str, Reader] = {prefix.table.launcher: _reader(prefix) for prefix in _PREFIXES}
"""Readers by the command's name."""
