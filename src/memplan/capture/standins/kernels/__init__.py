"""Rules for the operators of packages, whether a package is installed or stood in for."""

from __future__ import annotations

from memplan.capture.standins.kernels import bitsandbytes as bitsandbytes
from memplan.capture.standins.kernels import flash_attention
from memplan.capture.standins.rules import Rule


def rules() -> dict[str, Rule]:
    """By operator."""
    return {rule.name: rule for rule in (*flash_attention.RULES, *bitsandbytes.RULES)}
