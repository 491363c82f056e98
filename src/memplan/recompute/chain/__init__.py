"""Checkpoints on a chain of layers with the least peak: docs/recompute.md, "Least peak on a chain".

After Hong, Tsai, Wang, Liu and Wu, GPU Memory Usage Optimization for Backward Propagation in Deep
Network Training (2025).
"""

from memplan.recompute.chain.brute_force import least_peak_of_all
from memplan.recompute.chain.first import first_objective, least_first_objective
from memplan.recompute.chain.model import Chain, Layers, chain_of_layers
from memplan.recompute.chain.traced import Subset, is_monotone, least_peak, recurrence
from memplan.recompute.chain.walk import walk_peak, walk_reserved_peak

__all__ = [
    "Chain",
    "Layers",
    "Subset",
    "chain_of_layers",
    "first_objective",
    "is_monotone",
    "least_first_objective",
    "least_peak",
    "least_peak_of_all",
    "recurrence",
    "walk_peak",
    "walk_reserved_peak",
]
