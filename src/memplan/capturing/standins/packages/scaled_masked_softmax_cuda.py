"""Stand-in for Apex's `scaled_masked_softmax_cuda`."""

from __future__ import annotations

from memplan.capturing.standins.kernels.apex_softmax import functions

forward, backward, get_batch_per_block = functions("scaled_masked_softmax_cuda")
