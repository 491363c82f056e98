"""Samples that a step of the whole job takes, read off the script's options."""

from __future__ import annotations

from memplan.capturing.options import ScriptTarget
from memplan.fit.knobs import find_accumulation, find_knobs
from memplan.fit.options import find_value

_SPLIT = (
    frozenset({"tp", "tp_size", "tensor_parallel", "tensor_parallel_size",
               "tensor_parallel_degree", "tensor_model_parallel_size"}),
    frozenset({"pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size",
               "pipeline_parallel_degree", "pipeline_model_parallel_size"}),
    frozenset({"cp", "cp_size", "context_parallel", "context_parallel_size",
               "context_parallel_degree", "sp_size", "sequence_parallel_size"}),
)  # fmt: skip
"""Names of options that say over how many ranks one sample is split."""


def samples_per_step(program: ScriptTarget, ranks: int) -> int | None:
    """Batch size of a rank × accumulation × the ranks that have samples of their own; None where
    the batch size is not known or the ranks do not divide."""
    batch = next((knob for knob in find_knobs(program) if knob.kind == "batch_size"), None)
    if batch is None:
        return None
    split = 1
    for names in _SPLIT:
        found = find_value(program, names)
        split *= max(found.value, 1) if found is not None else 1
    if ranks % split:
        return None
    accumulation = find_accumulation(program)
    return batch.value * (accumulation.value if accumulation else 1) * (ranks // split)
