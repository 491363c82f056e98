"""`python -m memplan.worker TRACE [PIPE]`: see the package. `PIPE`: the number of a pipe, whose end
says that the request is there."""

from __future__ import annotations

import importlib
import os
import select
import sys
from pathlib import Path

import msgspec

from memplan.types.trace_file import save_trace
from memplan.worker.failure import outcome_of, show_traceback, was_interrupted
from memplan.worker.leave import leave
from memplan.worker.perform import perform
from memplan.worker.request import Outcome, read_request
from memplan.worker.signals import ended_by_signal, signals_now

_EXIT_INTERRUPTED = 130


_NEEDED = (
    "memplan.capturing.script",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)
"""Modules that a capture imports before it runs the program."""


def main(path: Path, pipe: int | None = None) -> int:
    """The exit code: that of the outcome, or 128 + the signal that ended the process, which then
    says nothing: who sent it knows, and who waits for this process sees it."""
    if pipe is not None:
        told = select.poll()
        told.register(pipe)
        if not told.poll(0):
            for name in _NEEDED:
                importlib.import_module(name)
        os.read(pipe, 1)
        os.close(pipe)
    with os.fdopen(0, "rb", closefd=False) as asked:
        encoded = asked.read()
    answer = os.dup(1)
    # The script finds no stdin and nothing of ours to write to, not even when it has ended.
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)

    def capture() -> int:
        signals_now()
        trace = perform(read_request(encoded), only_writes=(path.parent,))
        save_trace(trace, path, overwrite=True)
        return 0

    outcome = Outcome()
    try:
        code = ended_by_signal(capture, say=False)
        if code:
            return code
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except Exception as error:
        if was_interrupted(error):
            return _EXIT_INTERRUPTED
        show_traceback()
        outcome = outcome_of(error)
    with os.fdopen(answer, "wb") as file:
        file.write(msgspec.json.encode(outcome))
    return outcome.exit_code


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
