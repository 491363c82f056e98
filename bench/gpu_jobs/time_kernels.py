"""Single kernels on this machine's GPU beside the time model: a card's own table.

    python -m bench.gpu_jobs.time_kernels OUT.json GPU

What is measured over estimated is the card's factor for the class; `memplan calibrate` makes
efficiencies of the same measurements.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import gpu_turns
from memplan.runtime.kernel_cases import TimedCase, card_seconds, on_the_card, timed_cases
from memplan.timing.seconds import op_seconds
from memplan.types.device import DeviceProfile, find_profile


def table(card: DeviceProfile, cases: Sequence[TimedCase]) -> dict[str, Any]:
    """By case: seconds measured and estimated, or `error`."""
    return {
        one.name: {"error": one.error}
        if one.error
        else {
            "measured_seconds": one.seconds,
            "estimated_seconds": float(op_seconds(one.trace, card)[0]),
        }
        for one in cases
    }


def main(arguments: list[str]) -> int:
    out, gpu = arguments
    gpu_turns.be_alone()
    found = table(find_profile(gpu), timed_cases(on_the_card, card_seconds))
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
