"""Keeps the draws of each random generator in order, and notices whatever else moves one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.random_state import read_random_state

_RANDOM = "random "


def chain_of(device: torch.device) -> str:
    """The chain of what draws from the device's default generator, or moves it."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return f"{_RANDOM}{device}"


def address_of(generator: Any) -> int:
    """What tells it from others: PyTorch wraps one anew for each op."""
    return int(generator._cdata)


def chain_of_own(generator: torch.Generator) -> str:
    """The chain of what draws from a generator that is no device's default."""
    return f"generator {address_of(generator):x}"


def is_default(generator: torch.Generator) -> bool:
    """Whether it is a device's own, which ops draw from where they are given none."""
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    return any(address_of(generator) == address_of(one) for one in defaults)


class Generators:
    """The state of each generator after the last recorded op that moved it; to begin with, that
    from before the step."""

    def __init__(self, own: Iterable[torch.Generator]) -> None:
        """`own`: those that were there before the step, but for the devices' defaults."""
        self._own = {chain_of_own(generator): generator for generator in own}
        self._states: dict[str, torch.Tensor] = {}
        devices = [torch.device("cpu")]
        if torch.cuda.is_initialized():
            devices.append(torch.device("cuda", torch.cuda.current_device()))
        for chain in (*map(chain_of, devices), *self._own):
            self._states[chain] = self._state(chain)

    def _state(self, chain: str) -> torch.Tensor:
        with _disable_current_modes():
            if (generator := self._own.get(chain)) is not None:
                return generator.get_state()
            return read_random_state(torch.device(chain.removeprefix(_RANDOM)))

    def check(self, chain: str) -> None:
        """Raises NotCapturable where anything else has moved the generator, or made it."""
        before = self._states.get(chain)
        if before is None and not chain.startswith(_RANDOM):
            raise NotCapturable(
                "a random generator that the step makes",
                refused_at(),
                "make and seed it outside the step",
            )
        with _disable_current_modes():
            same = before is None or torch.equal(before, self._state(chain))
        if not same:
            raise NotCapturable(
                "random numbers are drawn or seeded where PyTorch's dispatcher does not see it",
                refused_at(),
            )

    def check_all(self) -> None:
        """At the step's end."""
        for chain in self._states:
            self.check(chain)

    def drawn(self, chains: tuple[str, ...]) -> None:
        """An op of these chains has run."""
        for chain in chains:
            if chain.startswith(_RANDOM) or chain in self._own:
                self._states[chain] = self._state(chain)

    def moved(self, device: torch.device, state: torch.Tensor) -> None:
        """A recorded op sets the state."""
        self._states[chain_of(device)] = state
