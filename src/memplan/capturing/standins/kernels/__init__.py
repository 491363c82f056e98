"""Rules for the operators of packages, whether a package is installed or stood in for."""

from __future__ import annotations

from memplan.capturing.standins.kernels import bitsandbytes as bitsandbytes
from memplan.capturing.standins.kernels import flash_attention, flash_attention_3
from memplan.capturing.standins.rules import Rule


def rules() -> dict[str, Rule]:
    """All rules by operator."""
    flash = (*flash_attention.RULES, *flash_attention_3.SCHEMAS)
    return {rule.name: rule for rule in (*flash, *bitsandbytes.RULES)}
