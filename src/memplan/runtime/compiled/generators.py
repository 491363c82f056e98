"""Keeps the draws of each random generator in order, and notices draws that nobody recorded."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memplan.runtime.compiled.lines import user_line
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.random_state import read_random_state

_RANDOM = "random "


def chain_of(device: torch.device) -> str:
    """The chain of what draws from the device's default generator, or moves it."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return f"{_RANDOM}{device}"


class Generators:
    """The state of each default generator after the last recorded op that moved it."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def check(self, device: torch.device) -> None:
        """Raises NotCapturable where anything else has moved the generator."""
        before = self._states.get(chain_of(device))
        with _disable_current_modes():
            same = before is None or torch.equal(before, read_random_state(device))
        if not same:
            raise NotCapturable(
                "random numbers are drawn or seeded where PyTorch's dispatcher does not see it",
                user_line(),
            )

    def drawn(self, chains: tuple[str, ...]) -> None:
        """An op of these chains has run."""
        for chain in chains:
            if chain.startswith(_RANDOM):
                device = torch.device(chain.removeprefix(_RANDOM))
                self._states[chain] = read_random_state(device)

    def moved(self, device: torch.device, state: torch.Tensor) -> None:
        """A recorded op sets the state."""
        self._states[chain_of(device)] = state
