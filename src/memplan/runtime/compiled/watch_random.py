"""Tells a recorder of Python that reads, sets or seeds random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.patching import Patches
from memplan.runtime.compiled.random_state import read_random_state, write_random_state
from memplan.runtime.compiled.recording import Recorder


def watch_random_state(recorder: Recorder, patches: Patches) -> None:
    """Until the patches are undone, Python's reads and writes are recorded."""

    def reading(device_of: Callable[[Any], torch.device]) -> Callable[..., Any]:
        def read(device: Any = None) -> torch.Tensor:
            place = device_of(device)
            with _unwatched():
                state = read_random_state(place)
                recorder.guarded(recorder.random.read, state, place)
            return state

        return read

    def writing(device_of: Callable[[Any], torch.device]) -> Callable[..., Any]:
        def write(new_state: torch.Tensor, device: Any = None) -> None:
            place = device_of(device)
            with _unwatched():
                recorder.guarded(recorder.random.write, new_state, place)
                write_random_state(new_state, place)

        return write

    def seeding(plain: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            recorder.refuse(
                NotCapturable(
                    "random numbers are seeded in the step", refused_at(), "seed outside it"
                )
            )
            return plain(*args, **kwargs)

        return seed

    def asking(plain: Callable[[], int]) -> Callable[[], int]:
        def initial_seed() -> int:
            recorder.refuse(NotCapturable("the seed is asked for in the step", refused_at()))
            return plain()

        return initial_seed

    for owner in (torch, torch.random):
        patches.replace(owner, "get_rng_state", reading(_cpu))
        patches.replace(owner, "set_rng_state", writing(_cpu))
        for name in ("manual_seed", "seed"):
            patches.replace(owner, name, seeding(getattr(owner, name)))
        patches.replace(owner, "initial_seed", asking(owner.initial_seed))
    for owner in (torch.cuda, torch.cuda.random):
        patches.replace(owner, "get_rng_state", reading(_cuda))
        patches.replace(owner, "set_rng_state", writing(_cuda))


@contextmanager
def _unwatched() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _cpu(device: Any) -> torch.device:
    return torch.device("cpu")


def _cuda(device: Any) -> torch.device:
    if device is None:
        device = torch.cuda.current_device()
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
