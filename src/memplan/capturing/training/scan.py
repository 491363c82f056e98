"""Reads the batches that a data loader will give ahead, without the model, in a copy of the
process.

The copy is forked before the loader gives its first batch. So it reads the script's own data in the
script's own order (tokenizer, sampler, collator and random generators are as in the job), and the
job notices nothing of it. It waits until its answer is wanted, and ends with the capture if that
never happens.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from memplan.capturing.training.host_draws import HostDraws

_MOST_KEPT = 48
"""The most batches of different sizes that are kept while the loader is read."""
_MOST_DIMS = 4
_ALIGNED = {1: 1, 2: 16, 3: 1, 4: 8}
"""For each place among batches of middle size, the largest power of two dividing its width."""
_MOST_DRAWN = 1_000_000
"""The most batches that a sampler is asked for when its epoch is cut short."""
_NO_SEED = 1 << 32
_GO = b"."


@dataclass
class Scan:
    """The batches of a loader."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each batch, in order."""
    widths: list[int] = field(default_factory=list)
    """The largest tensor dimension of each batch."""
    dims: list[list[int]] = field(default_factory=list)
    """As `Batches.dims`."""
    complete: bool = False
    """Whether the loader was read to its end."""
    failed: str = ""
    """Why it was not, if it failed."""
    generators: Any = None
    """The random generators' state behind the last batch; None if it was not read."""
    kept: dict[int, bytes] = field(default_factory=dict)
    """Some batches, pickled, by number: the largest, the smallest, the widest and others."""

    @property
    def varies(self) -> bool:
        return len(set(self.sizes)) > 1

    @property
    def largest(self) -> int:
        return int(np.argmax(self.sizes))

    def spread(self, count: int) -> list[int]:
        """Numbers of batches to capture: the largest, the smallest, the widest, and some others.
        Their sizes are spread as those of all batches are, and their widths are multiples of
        different powers of two, because kernels run other operators for aligned operands."""
        sizes = np.array(self.sizes)
        known = np.array(sorted(self.kept))
        wanted = np.quantile(sizes, np.linspace(0, 1, count + 2))
        near = []
        for place, size in enumerate(wanted[1:-1].tolist(), 1):
            among = known[(sizes[known] >= wanted[place - 1]) & (sizes[known] <= wanted[place + 1])]
            aligned = _ALIGNED.get(place)
            alike = [one for one in among.tolist() if _alignment(self.widths[one]) == aligned]
            among = np.array(alike) if alike else known
            near.append(int(among[np.abs(sizes[among] - size).argmin()]))
        widest = max(known.tolist(), key=lambda number: self.widths[number])
        return list(dict.fromkeys([self.largest, int(sizes.argmin()), widest, *near]))


class LoaderScan:
    """A copy of this process that waits before a loader's first batch."""

    def __init__(self, loader: Any, read: Callable[[Any], Iterator[Any]]) -> None:
        """`read`: PyTorch's own `DataLoader.__iter__`."""
        self.answered = False
        asked, ask = os.pipe()
        answered, answer = os.pipe()
        # Files, which are closed once: a number may be another file's by the second time.
        self._ask, self._answer = os.fdopen(ask, "wb", 0), os.fdopen(answered, "rb", 0)
        self._pid = os.fork()
        if self._pid == 0:
            self._ask.close()
            self._answer.close()
            _serve(asked, answer, loader, read)
        os.close(asked)
        os.close(answer)

    def result(self, seconds: float) -> Scan:
        """What was read until the loader's end, or within so many seconds."""
        self.answered = True
        answer = b""
        with _offsets_kept(), suppress(BrokenPipeError):
            self._ask.write(str(seconds).encode() + _GO)
            self._ask.close()
            answer = self._answer.read()
        self.end()
        try:
            found: Scan = pickle.loads(answer)
        except (EOFError, pickle.UnpicklingError):
            return Scan(failed="the process that read it ended")
        return found

    def end(self) -> None:
        """End it, also where nothing was asked."""
        self._ask.close()
        self._answer.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _serve(asked: int, answer: int, loader: Any, read: Callable[[Any], Iterator[Any]]) -> NoReturn:
    """Runs in the copy: wait, read, answer, and end."""
    status = 1
    try:
        question = b""
        while not question.endswith(_GO):
            piece = os.read(asked, 64)
            if not piece:
                os._exit(0)
            question += piece
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
        torch.set_num_threads(1)  # OpenMP's threads did not come along
        found = _read(loader, read, time.monotonic() + float(question[:-1]))
        left = memoryview(pickle.dumps(found))
        while left:
            left = left[os.write(answer, left) :]
        status = 0
    finally:
        os._exit(status)


def _read(loader: Any, read: Callable[[Any], Iterator[Any]], until: float) -> Scan:
    found, shapes = Scan(), []
    # In this process: a loader's workers would be children of a child that nobody looks after.
    settings = {"num_workers": 0, "prefetch_factor": None, "timeout": 0, "pin_memory": False}
    vars(loader).update(settings, _iterator=None)
    try:
        for number, batch in enumerate(read(loader)):
            sizes = _Sizes()
            found.sizes.append(sizes.of(batch))
            found.widths.append(max(sizes.shape, default=1))
            shapes.append(sizes.shape)
            _keep(found, number, batch)
            if time.monotonic() > until:
                break
        else:
            found.complete = True
            found.generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    except Exception as error:
        found.failed = f"{type(error).__name__}: {error}"
    found.dims = _different(shapes)
    return found


def draws_anew(loader: Any, draws: HostDraws) -> bool:
    """Whether the order in which the job reads a loader cannot be known. PyTorch's own generator
    has a seed of 53 random bits until a script seeds it."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    drawn = any(getattr(one, "generator", loader) is None for one in samplers)
    return drawn and (draws.missed or torch.initial_seed() >= _NO_SEED)


def run_dry(iterator: Any, scan: Scan | None) -> None:
    """End an epoch that was not read to its end: set the generators as if it had been, so that the
    next epoch has its true order."""
    with suppress(Exception):  # whatever a sampler of the script's own does
        # To its end, where a random sampler draws once more.
        most = min(len(iterator._index_sampler), _MOST_DRAWN)
        deque(itertools.islice(iterator._sampler_iter, most), maxlen=0)
    # Workers have generators of their own.
    if scan is not None and scan.generators is not None and iterator._num_workers == 0:
        of_torch, of_python, of_numpy = scan.generators
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _different(shapes: list[array[int]]) -> list[list[int]]:
    if len({len(shape) for shape in shapes}) != 1:
        return []
    columns = np.unique(np.array(shapes, np.int64), axis=1).T
    found: list[list[int]] = columns[(columns != columns[:, :1]).any(axis=1)].tolist()
    return found[:_MOST_DIMS]


def _alignment(width: int) -> int:
    """The largest power of two that divides a width."""
    return width & -width


def _keep(found: Scan, number: int, batch: Any) -> None:
    """Keep one batch of each size, and always the widest. Where there are too many sizes, every
    other one is dropped whose width is aligned as those of most are."""
    size, width = found.sizes[number], found.widths[number]
    known = {found.sizes[other] for other in found.kept}
    widest = max((found.widths[other] for other in found.kept), default=0)
    if size in known and width <= widest:
        return
    with suppress(Exception):  # what cannot be pickled cannot be given to the job
        found.kept[number] = pickle.dumps(batch)
    if len(found.kept) > _MOST_KEPT:
        by_size = sorted(found.kept, key=lambda other: found.sizes[other])
        widest_one = max(found.kept, key=lambda other: found.widths[other])
        aligned = {one: _alignment(found.widths[one]) for one in by_size[1:-1] if one != widest_one}
        (most, _), *_ = Counter(aligned.values()).most_common(1)
        for other in [one for one in aligned if aligned[one] == most][::2]:
            del found.kept[other]


def bytes_of_a_sample(batch: Any) -> float:
    """Bytes of the arrays of a batch by the first dimension of the first."""
    sizes = _Sizes()
    sizes.of(batch)
    return sizes.bytes / max(sizes.shape[0] if sizes.shape else 1, 1)


class _Sizes(pickle.Pickler):
    """Counts the bytes of a batch of any kind, from the objects that pickle finds in it."""

    def __init__(self) -> None:
        self._rest = io.BytesIO()
        super().__init__(self._rest)
        self.bytes = 0
        """Of all tensors."""
        self.shape = array("q")
        """Shapes of all tensors, in order."""

    def of(self, batch: Any) -> int:
        with suppress(Exception):  # beyond what cannot be pickled nothing is counted
            self.dump(batch)
        return self.bytes + self._rest.tell()

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor | np.ndarray):
            return None
        self.bytes += obj.nbytes
        self.shape.extend(obj.shape)
        return 0


@contextmanager
def _offsets_kept() -> Iterator[None]:
    """A context manager that restores positions of open files, which a fork shares."""
    before = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if path.is_file():
                before[int(path.name)] = os.lseek(int(path.name), 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, offset in before.items():
            with suppress(OSError):
                os.lseek(number, offset, os.SEEK_SET)
