"""Planned places before PyTorch's own CUDA allocator, by a library built against this PyTorch.

`python -m memplan.runtime.planned.adaptor` builds it, on the machine that trains. What the plan
does not serve is then PyTorch's as before: out of memory, statistics, snapshots, graphs, pools.
"""

from memplan.runtime.planned.adaptor.build import build, find, install

__all__ = ["build", "find", "install"]
