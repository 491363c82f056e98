"""The merged view: the disk as it is, under an overlay that receives every change.

The rules are those of a union mount. Below `upper` stands a partial copy of the directory tree with
all that was written; a path that exists there is read from there. A path in `hidden` (a whiteout)
and everything below it is not read from the disk any more. Neither set ever shrinks: what is made
again at a hidden path stands in `upper`, which comes first.

Paths are made canonical (absolute, links resolved as the merged view shows them) one directory at a
time, with the result remembered, so that the common case, reading from a directory in which nothing
was written, costs one dictionary lookup.
"""

from __future__ import annotations

import errno
import os
import posix
import posixpath
import stat
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memplan.capturing.sandbox import journal as jr

_REAL_ROOTS = ("/dev", "/proc", "/sys")
_SHARED_MEMORY = "/dev/shm"
_IPC_PREFIXES = ("torch_", "psm_", "wnsm_", "sem.", "pym-", "nccl-", "loky-", "joblib_", "mp-")
_DOTS = frozenset(("", ".", ".."))
_MAX_LINKS = 40
_MAX_PLACES = 1 << 16

REAL, LOWER, UPPER, ABSENT = range(4)


class Place(NamedTuple):
    """A directory, as lookups of its entries need it."""

    at: str
    """Canonical path."""
    real: bool
    """Outside the view: everything in it is the real thing."""
    touched: bool
    """May have entries in the overlay, or hidden ones."""
    covered: bool
    """The disk's entries are hidden."""
    straight: bool
    """The path it was found by leads to it on the disk as well."""

    @property
    def plain(self) -> bool:
        """Whether reads by the path it was found by go straight to the disk."""
        return self.straight and not (self.touched or self.covered)


class Spot(NamedTuple):
    """Where a path leads: its canonical form, where its bytes are, and in which layer."""

    at: str
    disk: str
    layer: int


def error(number: int, path: str, other: str | None = None) -> OSError:
    """The OSError that the system would raise for `path`."""
    if other is None:
        return OSError(number, os.strerror(number), path)
    return OSError(number, os.strerror(number), path, None, other)


def mode_of(path: str) -> int | None:
    """`st_mode` of what lies at `path` on the real disk, links not followed; None if nothing."""
    try:
        return posix.lstat(path).st_mode
    except OSError:
        return None


def join(base: str, name: str) -> str:
    """`name` in directory `base`; both canonical."""
    return f"{base}{name}" if base == "/" else f"{base}/{name}"


class View:
    """The merged view kept in the scratch directory `root`; shared by forked processes."""

    def __init__(self, root: str, create: bool = True) -> None:
        self.root = root
        self.upper = f"{root}/upper"
        self.temp = f"{root}/tmp"
        if create:
            posix.mkdir(self.upper, 0o700)
            posix.mkdir(self.temp, 0o700)
        self.journal = jr.Journal(root, create)
        self.lock = threading.RLock()
        self.refused: list[str] = []
        self.device_uses: list[str] = []
        self.closed = False
        self.on_write: Callable[[str], None] = lambda disk: None
        """Called with each file in the overlay before it is opened for writing."""
        self.supply: Callable[[str], bool] = lambda path: False
        """Asked when a file that is to be read is not there: whether it is by now."""
        self._mark = self.journal.mark
        self._real_prefixes = (*(f"{place}/" for place in (*_REAL_ROOTS, root)),)
        self._seen = b""
        self._shadows = False
        self._touched: set[str] = set()
        self._hidden: set[str] = set()
        self._places: dict[str, Place] = {}
        self._cwd = posix.getcwd()
        self.cwd_moved = False
        self.sync()

    # Facts shared between processes.

    def record(self, records: Iterable[tuple[jr.Kind, str]]) -> None:
        """Make facts known to every process of the sandbox, this one first."""
        fresh = [r for r in records if not self._known(*r)]
        if fresh:
            self.journal.append(fresh)
            self.sync()

    def _known(self, kind: jr.Kind, text: str) -> bool:
        if kind == jr.TOUCHED:
            return text in self._touched
        if kind == jr.HIDDEN:
            return text in self._hidden
        return kind == jr.SHADOWED and self._shadows

    def sync(self) -> None:
        """Learn what other processes recorded."""
        seen = self._mark[:8]
        if seen == self._seen:
            return
        with self.lock:
            for kind, text in self.journal.news():
                if kind == jr.TOUCHED:
                    self._touched.add(text)
                elif kind == jr.HIDDEN:
                    self._hidden.add(text)
                    self._shadows = True
                elif kind == jr.SHADOWED:
                    self._shadows = True
                elif kind == jr.REFUSED and text not in self.refused:
                    self.refused.append(text)
                elif kind == jr.DEVICE and text not in self.device_uses:
                    self.device_uses.append(text)
            self._places = {}
            self._seen = seen

    # The working directory.

    @property
    def cwd(self) -> str:
        """The working directory as the script sees it."""
        return self._cwd

    def enter(self, spot: Spot) -> None:
        """Change the working directory to an existing directory of the view."""
        posix.chdir(spot.disk)
        self._cwd = spot.at
        self.cwd_moved = spot.layer == UPPER

    def forget_cwd(self) -> None:
        """Take the real working directory as the script's (it was changed behind the view)."""
        self._cwd = self.virtual(posix.getcwd())

    def virtual(self, disk: str) -> str:
        """The path under which the view shows what lies at `disk`."""
        if disk == self.upper:
            return "/"
        return disk[len(self.upper) :] if disk.startswith(f"{self.upper}/") else disk

    def path_of(self, fd: int) -> str:
        """The path of an open descriptor, as the view shows it."""
        return self.virtual(posix.readlink(f"/proc/self/fd/{fd}"))

    # Lookup.

    def reading(self, path: str, follow: bool = True) -> str:
        """The file from which to read `path`: the path itself if nothing was written there. Raises
        FileNotFoundError if the view has no such file."""
        head, _, tail = path.rpartition("/")
        if path[0] == "/":
            key = head or "/"
        elif self.cwd_moved:
            return self._read_slow(path, follow)
        else:
            key = f"{self._cwd}/{head}" if head else self._cwd
        if self._mark[:8] != self._seen:
            self.sync()
        place = self._places.get(key)
        if place is None:
            place = self.place(key)
        if place.plain and tail not in _DOTS:
            # A link on the disk may lead to what was changed in the overlay.
            linked = self._shadows and follow and stat.S_ISLNK(mode_of(path) or 0)
            if not linked:
                return path
        return self._read_slow(path, follow)

    def _read_slow(self, path: str, follow: bool) -> str:
        spot = self.locate(path, follow)
        if spot.layer == ABSENT:
            raise error(errno.ENOENT, path)
        return spot.disk

    def locate(self, path: str, follow: bool = True) -> Spot:
        """The place that `path` leads to. Raises OSError (ELOOP, ENOTDIR) as the system would."""
        self.sync()
        if path[0] != "/":
            path = join(self._cwd, path)
        for _ in range(_MAX_LINKS):
            head, _, tail = path.rstrip("/").rpartition("/")
            if tail in _DOTS:
                return self._directory_spot(self.place(path))
            place = self.place(head or "/")
            spot = self._find(place, tail)
            if spot.layer == ABSENT:
                self._look_again(head)
            if spot.layer in (REAL, ABSENT) or not (follow or path.endswith("/")):
                return spot
            if not stat.S_ISLNK(mode_of(spot.disk) or 0):
                return spot
            path = posixpath.join(place.at, posix.readlink(spot.disk))
        raise error(errno.ELOOP, path)

    def _look_again(self, path: str) -> None:
        """A file may stand by now where this process knew of a directory, or of nothing: at `path`,
        above it, or where a link on the way leads. Raises NotADirectoryError."""
        self._places = {}
        self.place(path or "/")

    def _directory_spot(self, place: Place) -> Spot:
        if place.at == "/" or place.real:
            return Spot(place.at, place.at, REAL if place.real else LOWER)
        head, _, tail = place.at.rpartition("/")
        return self._find(self.place(head or "/"), tail)

    def _find(self, place: Place, name: str) -> Spot:
        at = join(place.at, name)
        if self.is_real(at):
            return Spot(at, at, REAL)
        visible = not place.covered and at not in self._hidden
        below = mode_of(at) if visible else None
        if place.touched:
            above = mode_of(self.upper + at)
            # A directory in both layers is the disk's own: it only got entries.
            both = stat.S_ISDIR(above or 0) and stat.S_ISDIR(below or 0)
            if above is not None and not both:
                return Spot(at, self.upper + at, UPPER)
        return Spot(at, at, ABSENT if below is None else LOWER)

    def is_real(self, at: str) -> bool:
        """Whether canonical `at` is outside the view: devices, kernel files, memory shared between
        processes, and the scratch directory itself."""
        if not at.startswith(self._real_prefixes):
            return at == self.root or at in _REAL_ROOTS
        if at.startswith(_SHARED_MEMORY) and not at.startswith(self.root):
            return at[len(_SHARED_MEMORY) + 1 :].startswith(_IPC_PREFIXES)
        return True

    def place(self, path: str, links: int = 0) -> Place:
        """The directory at an absolute path, which need not exist nor be canonical."""
        # The dictionary is taken first: should another thread learn something meanwhile, it puts a
        # new one in place, and what was found from the old facts is dropped with the old one.
        places = self._places
        place = places.get(path)
        if place is None:
            place = self._resolve(path, links)
            if len(places) >= _MAX_PLACES:
                self._places = {}
            places[path] = place
        return place

    def _resolve(self, path: str, links: int) -> Place:
        if links > _MAX_LINKS:
            raise error(errno.ELOOP, path)
        if not path.strip("/"):
            return Place("/", False, "/" in self._touched, False, True)
        head, _, name = path.rpartition("/")
        parent = self.place(head or "/", links)
        if name in ("", "."):
            return parent
        if name == "..":
            up = self.place(posixpath.dirname(parent.at), links)
            return up._replace(straight=parent.straight)
        spot = self._find(parent, name)
        straight = parent.straight and spot.layer != UPPER
        if spot.layer == REAL:
            return Place(spot.at, True, False, False, straight)
        kind = None if spot.layer == ABSENT else mode_of(spot.disk)
        if kind is not None and stat.S_ISLNK(kind):
            target = posixpath.join(parent.at, posix.readlink(spot.disk))
            place = self.place(target, links + 1)
            return place._replace(straight=straight and place.straight)
        if kind is not None and not stat.S_ISDIR(kind):
            raise error(errno.ENOTDIR, path)
        # What the overlay alone shows, or shows instead, has nothing of the disk's below it.
        covered = parent.covered or spot.layer == UPPER or spot.at in self._hidden
        return Place(spot.at, False, spot.at in self._touched, covered, straight)

    # What stands in a directory.

    def names(self, at: str) -> list[str]:
        """The entries of the directory at canonical path `at`, unsorted."""
        place = self.place(at)
        if place.plain:
            return posix.listdir(at)
        names: dict[str, None] = {}
        if not place.covered and stat.S_ISDIR(mode_of(at) or 0):
            names = {n: None for n in posix.listdir(at) if join(at, n) not in self._hidden}
        if stat.S_ISDIR(mode_of(self.upper + at) or 0):
            names.update(dict.fromkeys(posix.listdir(self.upper + at)))
        return list(names)

    def lower_visible(self, at: str) -> bool:
        """Whether the disk has something at canonical `at` that is not hidden."""
        head = self.place(posixpath.dirname(at))
        return not head.covered and at not in self._hidden and mode_of(at) is not None

    # Making room in the overlay.

    def mirror(self, at: str) -> str:
        """Make the existing directory `at` of the view exist in the overlay too, to hold a new
        entry; returns its path there."""
        inside = self.upper + at
        if mode_of(inside) is None:
            missing = [at]
            while mode_of(self.upper + (parent := posixpath.dirname(missing[-1]))) is None:
                missing.append(parent)
            for path in reversed(missing):
                try:
                    posix.mkdir(self.upper + path, 0o700)
                except FileExistsError:  # Another process of the sandbox was first.
                    continue
        self.record([(jr.TOUCHED, at)])
        return inside

    def room_for(self, at: str, path: str) -> str:
        """The place in the overlay for a new entry `at`; `path` is the script's name for it. Raises
        FileNotFoundError or NotADirectoryError if its directory does not exist."""
        parent = posixpath.dirname(at)
        spot = self._directory_spot(self.place(parent))
        if spot.layer == ABSENT:
            raise error(errno.ENOENT, path)
        if not stat.S_ISDIR(posix.stat(spot.disk).st_mode):
            raise error(errno.ENOTDIR, path)
        return join(self.mirror(parent), posixpath.basename(at))

    def hide(self, at: str) -> None:
        """Stop showing what the disk has at `at`."""
        self.mirror(posixpath.dirname(at))
        self.record([(jr.HIDDEN, at)])

    def after_fork(self) -> None:
        """Called in a forked child: another thread of the parent may have held the lock."""
        self.lock = threading.RLock()

    def close(self) -> None:
        """Release the journal; the scratch directory is its owner's to remove."""
        self.closed = True
        self.journal.close()
