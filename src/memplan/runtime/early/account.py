"""What came of a plan's early updates in a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Account:
    planned: int
    """Parameters that the plan updates early in a step."""
    parameters: int = 0
    """That were updated early in a step, the most."""
    steps: int = 0
    """With early updates."""
    ended: str = ""
    """Why they are made by the optimizer's step instead, from the first step or from then on."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
