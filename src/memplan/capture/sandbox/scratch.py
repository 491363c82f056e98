"""The directory that takes what the script writes."""

from __future__ import annotations

import os
import posix
import shutil
import stat
import tempfile

from memplan.types.errors import CaptureError

_CANDIDATES = ("/tmp", "/var/tmp", "/dev/shm")


def make_scratch() -> str:
    """A new private directory, in `$TMPDIR` or the first other place that can be written.

    Raises CaptureError where none can. The shared memory comes last: DataLoader workers need it.
    """
    tried = [p for p in (os.environ.get("TMPDIR"), *_CANDIDATES) if p and p.startswith("/")]
    for parent in tried:
        try:
            return os.path.realpath(tempfile.mkdtemp(prefix="memplan-", dir=parent))
        except OSError:
            continue
    raise CaptureError(
        f"no directory for temporary files can be written (tried {', '.join(tried)})",
        "set TMPDIR to a directory that can",
    )


def remove_scratch(root: str) -> None:
    """Delete the scratch directory and all in it."""
    # A script may have taken its own rights to a directory.
    for directory, children, _ in os.walk(root):
        for name in children:
            path = f"{directory}/{name}"
            if not stat.S_ISLNK(posix.lstat(path).st_mode):
                posix.chmod(path, stat.S_IRWXU)
    shutil.rmtree(root, ignore_errors=True)
