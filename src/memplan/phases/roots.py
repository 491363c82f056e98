"""Names of the root modules that a job called, as a plan has them (`RecomputePart.kinds`)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memplan.phases.passes import call_numbers
from memplan.types.step_graph import Bools
from memplan.types.trace import Phase, Role, Trace


def root_names(trace: Trace) -> dict[int, str]:
    """The root module of each call in which something runs with gradients, by the call's number.

    A name is the class, with `#1`, `#2`, … from the second module of that class on, in the order of
    first calls. A trace does not tell modules apart: calls of one class belong to one module if
    they read a parameter in common, or a copy of one that an earlier call made (cast by autocast,
    gathered by FSDP); calls that read none count as the first module's.
    """
    ops = trace.ops
    call, _ = call_numbers(ops.call)
    rows = np.flatnonzero((call >= 0) & (ops.phase == Phase.FORWARD))
    is_parameter = trace.storages.role == Role.PARAMETER
    for row in np.flatnonzero(_may_copy(trace)).tolist():
        read = ops.reads[ops.reads_start[row] : ops.reads_start[row + 1]]
        if is_parameter[read[read >= 0]].any():
            written = ops.writes[ops.writes_start[row] : ops.writes_start[row + 1]]
            is_parameter[written[written >= 0]] = True
    calls, first, counts = np.unique(call[rows], return_index=True, return_counts=True)
    owners: dict[tuple[str, int], int] = {}
    """By class and parameter: the module's number."""
    known: Counter[str] = Counter()
    names = {}
    for number, begin, count in zip(calls.tolist(), first.tolist(), counts.tolist(), strict=True):
        of_call = rows[begin : begin + count]
        kind = trace.strings[int(ops.module[of_call[0]])].split(".")[0]
        read = ops.reads[ops.reads_start[of_call[0]] : ops.reads_start[of_call[-1] + 1]]
        read = read[read >= 0]
        parameters = [(kind, one) for one in np.unique(read[is_parameter[read]]).tolist()]
        module = next((owners[one] for one in parameters if one in owners), None)
        if module is None and parameters:
            module = known[kind]
            known[kind] += 1
        owners.update(dict.fromkeys(parameters, module or 0))
        names[number] = f"{kind}#{module}" if module else kind
    return names


def _may_copy(trace: Trace) -> Bools:
    """Operators that may cast or gather parameters."""
    copies = ("aten._to_copy.", "c10d._allgather_base_.")
    names = [number for number, text in enumerate(trace.strings) if text.startswith(copies)]
    return np.isin(trace.ops.name, names)
