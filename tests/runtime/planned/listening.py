"""A listener that writes down what it is told, in short words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memplan.runtime.planned.phases import JobHooks
from memplan.types.trace import Phase

_SHORT = {
    Phase.SETUP: "setup",
    Phase.FORWARD: "F",
    Phase.BACKWARD: "B",
    Phase.OPTIMIZER: "O",
    Phase.EVALUATION: "E",
}


class Heard:
    """Letters of phases; `|` after a step; `(F)` where an evaluation's end leads back to it."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.modules: list[str] = []

    def entered(self, phase: Phase) -> None:
        self.words.append(_SHORT[phase])

    def resumed(self, phase: Phase) -> None:
        self.words.append(f"({_SHORT[phase]})")

    def stepped(self) -> None:
        self.words.append("|")

    def in_module(self, path: str) -> None:
        self.modules.append(path)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@contextmanager
def listening(*, modules: bool = False) -> Iterator[tuple[Heard, JobHooks]]:
    heard = Heard()
    with JobHooks(heard) as hooks:
        hooks.watch_all(modules=modules)
        yield heard, hooks
