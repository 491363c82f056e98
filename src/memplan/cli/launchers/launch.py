"""What a launcher's command comes to: the program, the ranks it runs as, what they find around
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memplan.capturing.options import RankPlace, ScriptTarget
from memplan.types.errors import UsageError


@dataclass(frozen=True)
class World:
    """The processes that a launcher starts: `size` in all, `local_size` on every node."""

    size: int
    local_size: int

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    def place(self, rank: int) -> RankPlace:
        """Raises UsageError for a rank that the job does not have."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"--rank {rank}: the job has {self.size} ranks, counted from 0",
                f"--rank {self.size - 1}" if rank > 0 else "--rank 0",
            )
        return RankPlace(rank, self.size, self.local_size)

    def __str__(self) -> str:
        if self.nodes == 1:
            return f"{self.size} {'process' if self.size == 1 else 'processes'}"
        return f"{self.size} processes ({self.nodes} nodes of {self.local_size})"


@dataclass(frozen=True)
class Layer:
    """One launcher of a command; `srun … torchrun …` has two."""

    launcher: str
    """The launcher's name in messages."""
    world: World | None = None
    """None: it starts one process and says nothing of ranks, as `env` and `python` do."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Environment that is the same for every process it starts."""
    ranked: Callable[[RankPlace], Mapping[str, str]] | None = None
    """Environment that depends on the process."""
    rank_option: str = ""
    """Option that the program is given before its own, with its local rank: `--local_rank`."""
    no_rank_option: str = ""
    """How it is told to leave that away."""
    module_option: str = "-m"
    """How it is told that the program is a module."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A program as its launchers start it.

    Attributes:
        target: the program, with the arguments that the user gave it.
        layers: its launchers, the outermost first; empty without any.
        before: the words of the command before the program's name.
        world: the ranks that the program sees; None when it is a job of one process.
    """

    target: ScriptTarget
    layers: tuple[Layer, ...] = ()
    before: tuple[str, ...] = ()
    world: World | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for layer in self.layers for note in layer.notes)

    def environment(self, place: RankPlace | None) -> dict[str, str]:
        """What the launchers add to the environment of the process at `place`; where two set the
        same variable, the inner one wins."""
        found: dict[str, str] = {}
        for layer in self.layers:
            found |= layer.fixed
            if layer.ranked is not None and layer.world is not None:
                found |= layer.ranked(_place_within(layer.world, place))
        return found

    def arguments(self, place: RankPlace | None) -> tuple[str, ...]:
        """What the launchers put before the program's own arguments."""
        local = place.local_rank if place else 0
        return tuple(f"{layer.rank_option}={local}" for layer in self.layers if layer.rank_option)

    def words(self, target: ScriptTarget | None = None) -> list[str]:
        """The command; with `target` in its program's place, which must be of the same kind."""
        target = target or self.target
        return [*self.before, target.name, *target.argv]

    def words_below(self, *module: str) -> list[str]:
        """The command with `-m MODULE…` between the launchers and the program, as in
        `torchrun … -m memplan run … train.py`; `memplan run … train.py` without a launcher."""
        own = [self.target.name, *self.target.argv]
        if self.target.kind == "module":
            own = ["-m", *own]
        if not self.layers:
            return [*module, *own]
        last = self.layers[-1]
        words = list(self.before)
        if not last.module_option:  # srun ./train.py
            words.append("python")
        if last.rank_option:
            words.append(last.no_rank_option)
        if self.target.kind == "script":
            words.append(last.module_option or "-m")
        return [*words, *module, *own]


def innermost(layers: tuple[Layer, ...]) -> World | None:
    """The ranks that the program sees below these launchers. A launcher below another is started
    once on each node. Raises UsageError where the numbers contradict each other."""
    world: World | None = None
    outer = ""
    for layer in layers:
        if layer.world is None:
            continue
        if world is not None and world.size not in (1, layer.world.nodes):
            raise UsageError(
                f"{outer} starts {layer.launcher} {world.size} times, but {layer.launcher} is told "
                f"of {layer.world.nodes} {'node' if layer.world.nodes == 1 else 'nodes'}",
                f"one {layer.launcher} on each node, and the same number of nodes for both",
            )
        world, outer = layer.world, layer.launcher
    return world


def _place_within(world: World, place: RankPlace | None) -> RankPlace:
    """The process of an outer launcher that the process at `place` descends from."""
    if place is None or world.size == 1:
        return RankPlace(0, world.size, world.local_size)
    rank = place.rank if world.size == place.world_size else place.node
    return RankPlace(rank, world.size, world.local_size)
