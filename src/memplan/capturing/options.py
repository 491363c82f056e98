"""What to capture and how; free of torch, so that the command line can build it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from memplan.types.device import DeviceProfile
from memplan.types.plan import Plan

OUR_OPTIONS = frozenset(
    {
        *("--gpu", "--routing", "--alloc-conf", "--allow-network", "--with", "--world-size"),
        *("--gpus-per-node", "--rank", "--maximize", "--multiple-of", "--from-snapshot", "--json"),
    }
)
"""Options of memplan's command line; users sometimes put them behind a launcher or the script."""


@dataclass(frozen=True)
class ScriptTarget:
    """A user's program, as `python SCRIPT ARGS…` or `python -m MODULE ARGS…` would run it."""

    kind: Literal["script", "module"]
    name: str
    """Path of the script, or dotted name of the module."""
    argv: tuple[str, ...] = ()
    """The program's own arguments, verbatim; `sys.argv[1:]` of the program."""

    @classmethod
    def of(cls, words: Sequence[str]) -> ScriptTarget:
        """Of `SCRIPT ARGS…` or `-m MODULE ARGS…`."""
        kind: Literal["script", "module"] = "module" if words[0] == "-m" else "script"
        name, *argv = words[1:] if kind == "module" else words
        return cls(kind, name, tuple(argv))

    @property
    def command(self) -> list[str]:
        return [self.name, *self.argv]

    def with_option(self, option: str, value: int | str) -> ScriptTarget:
        """The same target with another value of the option, appended if it was not given."""
        argv = list(self.argv)
        for index in range(len(argv) - 1, -1, -1):
            name, equals, _ = argv[index].partition("=")
            if name != option:
                continue
            if equals:
                argv[index] = f"{name}={value}"
            elif index + 1 < len(argv):
                argv[index + 1] = str(value)
            return replace(self, argv=tuple(argv))
        return replace(self, argv=(*argv, option, str(value)))

    def with_flag(self, flag: str) -> ScriptTarget:
        """The same target with one more word; the last of a pair such as `--x --no-x` counts."""
        return replace(self, argv=(*self.argv, flag))

    def without_flag(self, flag: str) -> ScriptTarget:
        return replace(self, argv=tuple(word for word in self.argv if word != flag))

    def as_rank(self, own: RankPlace, other: RankPlace) -> ScriptTarget:
        """The program of another rank: launchers may tell a rank in an argument."""
        argv = list(self.argv)
        for option in ("--local_rank", "--local-rank"):
            told = f"{option}={own.local_rank}"
            argv = [f"{option}={other.local_rank}" if word == told else word for word in argv]
        return replace(self, argv=tuple(argv))

    def with_arguments(self, plan: Plan) -> ScriptTarget:
        """The same target with the values that a plan's part `arguments` gives its options;
        unchanged where the plan was made from other arguments."""
        program = self
        if plan.arguments is not None and plan.made_from.command == self.command:
            for change in plan.arguments.changes:
                program = program.with_option(change.option, change.value)
        return program


@dataclass(frozen=True)
class RankPlace:
    """Which process of a distributed job is captured; ranks fill one node after the other."""

    rank: int
    """Rank in the whole job, in `[0, world_size)`."""
    world_size: int
    local_world_size: int
    """Processes, hence GPUs, of one node."""
    gpus: int | None = None
    """GPUs that the processes of a node can see, where they are not one each."""

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size


STEPS_TO_PLAN = 4
"""Steps of a capture from which addresses are planned: the first one differs, and of the last one
the trace does not tell what it releases later."""


@dataclass(frozen=True)
class CaptureOptions:
    """How a capture behaves."""

    profile: DeviceProfile
    """The GPU that the program sees."""
    steps: int | None = None
    """Optimizer steps to run; None stops once the steady step repeats."""
    routing: Literal["balanced", "worst"] = "balanced"
    """Assumption for shapes that depend on data."""
    scan_seconds: float = 0.0
    """Seconds for reading data loaders ahead, to capture their largest batches, too; 0 for none."""
    allow_network: bool = False
    packages: tuple[str, ...] = ()
    """Packages that the job's machine has and that are stood in for here, also where the program
    only probes for them; and files of rules (`….py`), run before the program."""
    place: RankPlace | None = None
    """The process of a distributed job to be; None: started without a launcher."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What a launcher adds to the environment, beside what every launcher says of the place."""
