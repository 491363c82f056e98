"""Stack traces of a memory snapshot → the user's source line, the operator and the phase.

Frames are innermost first, as PyTorch writes them; C++ frames are there only when the history was
recorded with `stacks="all"`. What a trace of the autograd engine's own threads looks like from
Python is an empty list.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from memplan.types.builder import printable
from memplan.types.errors import FormatError
from memplan.types.trace import Phase

_NATIVE_FILE = re.compile(r"^$|^\?\?$|\.(?:c|cc|cpp|cu|cuh|h|hpp|inl|pyx|S)$|\.so(?:\.|$)")
_NATIVE_OPERATOR = re.compile(r"\bat::_ops::(\w+)::(?:call|redispatch)\b")
_ALLOCATING_ONLY = re.compile(r"^(?:empty|new_empty|resize|_resize|set_|_to_copy$|clone$)")
_TORCH = re.compile(r"(?:^|/)(torch/(?!testing/).*)\.py$")
_LIBRARY = re.compile(r"(?:^|/)(?:site|dist)-packages/|(?:^|/)lib/python3[^/]*/|^<")
MOST_FRAMES = 16
_RUNS_BACKWARD = ("_engine_run_backward", "unpack_hook", "recompute_fn")


class Place(NamedTuple):
    """The place of an allocation; strings are empty where unknown."""

    source: str
    """`file:line` of the innermost frame outside PyTorch and other installed packages, or of the
    innermost one outside PyTorch where there is no such frame."""
    op: str
    phase: Phase | None
    """None when the frames do not say."""


NOWHERE = Place("", "", None)


class FrameReader:
    """Reads each distinct stack once; most allocations share theirs with others."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._known: dict[tuple[int, ...], Place] = {}

    def place(self, frames: Any) -> Place:
        """The place in a list of frames. Raises FormatError for anything but frames. The frames
        must stay alive, because stacks are cached by the identity of their frames."""
        if not frames:
            return NOWHERE
        if not isinstance(frames, list | tuple):
            raise self._error()
        key = tuple(map(id, frames))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._read(frames)
        return found

    def _read(self, frames: Any) -> Place:
        try:
            stack = _stack(frames)
        except (TypeError, KeyError, ValueError, IndexError):
            raise self._error() from None
        return Place(_source(stack), _operator(stack), _phase(stack))

    def _error(self) -> FormatError:
        return FormatError(
            f"{self._where}: a stack frame is not a dict of filename, line and name",
            "a file written by torch.cuda.memory._dump_snapshot(FILE)",
        )


_Stack = list[tuple[str, int, str]]


def _stack(frames: Any) -> _Stack:
    return [
        (printable(str(f["filename"])), int(f["line"]), printable(str(f["name"]))) for f in frames
    ]


def _source(stack: _Stack) -> str:
    outside = [
        (file, line)
        for file, line, _ in stack
        if not _NATIVE_FILE.search(file) and not _TORCH.search(file) and not file.startswith("<")
    ]
    own = [place for place in outside if not _LIBRARY.search(place[0])]
    file, line = next(iter(own or outside), ("", 0))
    return f"{file}:{line}" if file else ""


def user_stack(frames: Any) -> list[str]:
    """`file:line function` of the frames outside PyTorch and other installed packages, innermost
    first; without such frames, of all that are Python's. Frames as `FrameReader.place` takes them.
    """
    stack = _stack(frames or ())
    python = [one for one in stack if not _NATIVE_FILE.search(one[0])]
    own = [one for one in python if not _TORCH.search(one[0]) and not _LIBRARY.search(one[0])]
    return [f"{file}:{line} {name}" for file, line, name in (own or python)[:MOST_FRAMES]]


def _operator(stack: _Stack) -> str:
    """The innermost ATen operator that does more than allocate, else the PyTorch function that
    the user's code called."""
    for _, _, name in stack:
        native = _NATIVE_OPERATOR.search(name)
        if native and not _ALLOCATING_ONLY.match(native[1]):
            return f"aten.{native[1]}"
    for file, _, name in stack:
        if _NATIVE_FILE.search(file):
            continue
        inside = _TORCH.search(file)
        if inside is None:
            return ""
        return f"{inside[1].replace('/', '.').removesuffix('.__init__')}.{name}"
    return ""


def _phase(stack: _Stack) -> Phase | None:
    forward = None
    for file, _, name in stack:
        if name.startswith("torch::autograd::Engine::") or name in _RUNS_BACKWARD:
            return Phase.BACKWARD
        inside = _TORCH.search(file)
        module = inside[1] if inside else ""
        if module.startswith("torch/optim/") and name != "zero_grad":
            return Phase.OPTIMIZER
        if module.startswith("torch/nn/") and not module.startswith("torch/nn/utils/"):
            forward = Phase.FORWARD
    return forward


class PhaseTracker:
    """Follows phases and optimizer steps from one allocation to the next."""

    def __init__(self) -> None:
        self.phase = Phase.SETUP
        self.step = 0
        """Optimizer steps completed."""

    def allocation(self, place: Place, *, has_frames: bool) -> None:
        """Take note of where an allocation came from."""
        phase = place.phase
        if phase is None:
            phase = self._guess(has_frames)
        if self.phase is Phase.OPTIMIZER and phase is not Phase.OPTIMIZER:
            self.step += 1
        self.phase = phase

    def _guess(self, has_frames: bool) -> Phase:
        if self.phase is Phase.SETUP:
            return Phase.SETUP
        if not has_frames and self.phase in (Phase.FORWARD, Phase.BACKWARD):
            return Phase.BACKWARD  # the engine's threads run no Python
        return Phase.FORWARD if self.phase is Phase.FORWARD else Phase.OTHER
