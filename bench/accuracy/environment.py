"""The transformers library of the measured jobs.

They ran with torch 2.6 (some perhaps with 2.3) and a transformers that knew Qwen3, so 4.51 or a
little later. What a model saves and what its outputs keep alive differs between versions by
several percent: 4.51 copies query, key and value before SDPA and its cache keeps the originals; 5.x
keeps the query's projection and concatenates copies into its cache. So the jobs are replayed with
4.51.3, which is installed once into a folder of its own and put before the installed one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.results import ROOT

SITE = ROOT / "build" / "accuracy-site"
TRANSFORMERS = "4.51.3"
REQUIREMENTS = (
    f"transformers=={TRANSFORMERS}",
    "tokenizers==0.21.4",
    "huggingface-hub==0.36.2",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "charset-normalizer==3.5.2",
    "certifi==2026.10.18",
)


def transformers_site() -> Path | None:
    """The folder to put on PYTHONPATH, made when absent; None when it cannot be (no network)."""
    if (SITE / f"transformers-{TRANSFORMERS}.dist-info").is_dir():
        return SITE
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q",
        "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE), *REQUIREMENTS,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        print(f"no transformers {TRANSFORMERS}: using the installed one", file=sys.stderr)
        return None
    return SITE
