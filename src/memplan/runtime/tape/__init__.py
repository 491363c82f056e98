"""Drop what autograd saves, and recompute it from a record of the ops when backward asks; or send
it to the host and fetch it again.

A *tape* is made of one forward call of a root module. Ops are recorded where a dispatch mode sees
them, below autograd and autocast, so recomputing runs the same kernels on the same inputs and
nothing of the user's Python: no module hook, no counter, no batch norm statistic happens twice.
"""

from memplan.runtime.tape.decisions import Call, Decisions, Needed, decisions_by_call
from memplan.runtime.tape.functions import hooks_are_refused
from memplan.runtime.tape.offload import Offload, Pass
from memplan.runtime.tape.recording import Recording
from memplan.runtime.tape.storages import Inputs

__all__ = [
    "Call",
    "Decisions",
    "Inputs",
    "Needed",
    "Offload",
    "Pass",
    "Recording",
    "decisions_by_call",
    "hooks_are_refused",
]
