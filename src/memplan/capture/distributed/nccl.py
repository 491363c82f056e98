"""The name `ProcessGroupNCCL`, which a build without CUDA lacks, for scripts that set options."""

from __future__ import annotations

import types
from typing import Any


class Options:
    """`ProcessGroupNCCL.Options`: kept, and without effect on what is captured."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.backend = "nccl"
        self.config: Any = types.SimpleNamespace()
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout: Any = None


class ProcessGroupNCCL:
    """For annotations, `isinstance` (always false) and `Options`."""

    Options = Options
