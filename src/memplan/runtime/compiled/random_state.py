"""Reading and setting the state of a random generator, as operators of a step's graph.

Checkpointing does both around what it recomputes; neither is seen by the dispatcher.
"""

from __future__ import annotations

import torch


def read_random_state(device: torch.device) -> torch.Tensor:
    """Of the device's default generator."""
    return generator_of(device).get_state()


def write_random_state(state: torch.Tensor, device: torch.device) -> None:
    generator_of(device).set_state(state)


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
