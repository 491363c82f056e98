"""An unmodified script on fake CUDA, and files of other tools, as a `Trace`."""

from __future__ import annotations

from memplan._callable import make_callable

make_callable(__name__, "capture")
