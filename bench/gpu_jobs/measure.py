"""Run a script for real and write down what PyTorch's allocator did.

    python measure.py OUT.json SNAPSHOT.pickle SCRIPT [ARGS…]

The script runs as `__main__`, unchanged; the memory history is on before its first line. The
result is written even when the script fails (`error` says how).
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

HISTORY_EVENTS = 2_000_000


def measured(error: str) -> dict[str, Any]:
    """The allocator's peaks of this process, and the device's view of it."""
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {
        "error": error,
        "device_name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "requested_bytes_peak": stats.get("requested_bytes.all.peak", 0),
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
        "device_used_bytes": total - free,
        "device_total_bytes": total,
    }


def main(arguments: list[str]) -> int:
    out, snapshot, script, *rest = arguments
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=HISTORY_EVENTS
    )
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).parent))
    error = ""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        error = f"exit code {left.code}" if left.code else ""
    except Exception:
        error = traceback.format_exc()[-2000:]
    torch.cuda.synchronize()
    Path(out).write_text(json.dumps(measured(error)), encoding="utf-8")
    torch.cuda.memory._dump_snapshot(snapshot)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
