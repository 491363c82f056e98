"""The directory that takes what the script writes."""

from __future__ import annotations

import fcntl
import os
import posix
import shutil
import stat
import tempfile
import time
from pathlib import Path

from memplan.types.errors import CaptureError

_PREFIX = "memplan-"
_STALE_AFTER = 60.0
_CANDIDATES = ("/tmp", "/var/tmp", "/dev/shm")


def make_scratch() -> str:
    """A new private directory, in `$TMPDIR` or the first other place that can be written.

    Raises CaptureError where none can. The shared memory comes last: DataLoader workers need it.
    """
    tried = [p for p in (os.environ.get("TMPDIR"), *_CANDIDATES) if p and p.startswith("/")]
    for parent in tried:
        try:
            root = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            remove_stale(Path(root).parent)
            return root
        except OSError:
            continue
    raise CaptureError(
        f"no directory for temporary files can be written (tried {', '.join(tried)})",
        "set TMPDIR to a directory that can",
    )


def remove_stale(parent: Path) -> None:
    """Delete what processes that were killed left in `parent`."""
    for root in parent.glob(f"{_PREFIX}*"):
        if _is_abandoned(str(root)):
            remove_scratch(str(root))


def _is_abandoned(root: str) -> bool:
    """Whether nobody holds the lock on a journal that is ours and not just being made."""
    try:
        fd = posix.open(f"{root}/journal", posix.O_RDWR | posix.O_CLOEXEC | posix.O_NOFOLLOW)
    except OSError:
        return False
    try:
        status = posix.fstat(fd)
        if status.st_uid != posix.getuid() or time.time() - status.st_mtime < _STALE_AFTER:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        posix.close(fd)
    return True


def remove_scratch(root: str) -> None:
    """Delete the scratch directory and all in it."""
    # A script may have taken its own rights to a directory.
    for directory, children, _ in os.walk(root):
        for name in children:
            path = f"{directory}/{name}"
            if not stat.S_ISLNK(posix.lstat(path).st_mode):
                posix.chmod(path, stat.S_IRWXU)
    shutil.rmtree(root, ignore_errors=True)
