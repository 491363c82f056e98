"""What the reader of one launcher's words is told, and what it answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memplan.cli.launchers.launch import Layer
from memplan.types.errors import UsageError

MOST_GPUS_PER_NODE = 8
"""Number of GPUs in a node that nothing else is said about."""


@dataclass(frozen=True)
class Context:
    """What is known where a launcher's words begin.

    Attributes:
        gpus_per_node: what the user told us; None when nothing.
        environment: what launchers further out have set.
    """

    gpus_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def variable(self, name: str) -> str | None:
        """A variable as the launcher would find it."""
        return self.environment.get(name, os.environ.get(name))

    def gpus(self, what: str, hint: str) -> int:
        """GPUs of a node, for `what` that counts them. Raises UsageError where they are unknown:
        the card of the estimate need not be this machine's."""
        if self.gpus_per_node is None:
            raise UsageError(
                f"{what} counts the GPUs of the machine it runs on, and they are not known here",
                f"{hint}, or --gpus-per-node 8 before the launcher",
            )
        return self.gpus_per_node


@dataclass(frozen=True)
class Step:
    """One launcher's words, read: the layer, and what it starts - the program, or a further
    command."""

    layer: Layer
    program: list[str] | None = None
    """Script or module, and its arguments."""
    is_module: bool = False
    command: list[str] | None = None
    """Words of a command that is read in turn."""


Reader = Callable[[list[str], Context], Step]
"""Reads the words after a launcher's name."""


def ranks_of_node(launcher: str, size: int, local: int | None, context: Context) -> int:
    """Processes on each node: `local` where the launcher says, else as many as a node has GPUs.

    Raises UsageError when the nodes would not be alike.
    """
    chosen = local or min(context.gpus_per_node or MOST_GPUS_PER_NODE, size)
    if size % chosen == 0:
        return chosen
    fitting = max(n for n in range(1, chosen) if size % n == 0)
    raise UsageError(
        f"{launcher}: {size} processes do not divide into nodes of {chosen}",
        f"a multiple of {chosen}" if local else f"--gpus-per-node {fitting} before the launcher",
    )
