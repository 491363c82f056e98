"""Samples that a step of the whole job takes: as the capture saw them, and the script's options
where they say more."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.capturing.options import ScriptTarget
from memplan.fit.knobs import find_accumulation, find_knobs
from memplan.fit.options import find_value
from memplan.types.estimate import Estimate

_SPLIT = (
    frozenset({"tp", "tp_size", "tensor_parallel", "tensor_parallel_size",
               "tensor_parallel_degree", "tensor_model_parallel_size"}),
    frozenset({"pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size",
               "pipeline_parallel_degree", "pipeline_model_parallel_size"}),
    frozenset({"cp", "cp_size", "context_parallel", "context_parallel_size",
               "context_parallel_degree", "sp_size", "sequence_parallel_size"}),
)  # fmt: skip
"""Names of options that say over how many ranks one sample is split."""


@dataclass(frozen=True)
class Samples:
    """What a command says of the samples of a step.

    Attributes:
        batch: of a rank, in one pass; None where not known.
        accumulation: passes of a step.
        ranks: those that have samples of their own.
    """

    batch: int | None
    accumulation: int
    ranks: int

    @classmethod
    def of(cls, program: ScriptTarget, ranks: int) -> Samples | None:
        """None where a sample is split over a number that does not divide the ranks."""
        split = 1
        for names in _SPLIT:
            found = find_value(program, names)
            split *= max(found.value, 1) if found is not None else 1
        if ranks % split:
            return None
        batch = next((knob for knob in find_knobs(program) if knob.kind == "batch_size"), None)
        accumulation = find_accumulation(program)
        return cls(
            batch.value if batch else None,
            accumulation.value if accumulation else 1,
            ranks // split,
        )

    def per_step(self, estimate: Estimate) -> int | None:
        """Samples of a step of the whole job: of the batches that data loaders gave the rank of the
        estimate; without loaders, of the options' batch size, and as many batches as the rank
        copied to its card, or else as the options say. None where not known."""
        own = estimate.samples_per_step
        if own is None and self.batch is not None:
            own = self.batch * (estimate.batches_per_step or self.accumulation)
        return None if own is None else round(own * self.ranks)
