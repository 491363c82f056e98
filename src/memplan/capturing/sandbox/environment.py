"""The script's environment: services told to stay quiet, and the process put back as it was."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

from memplan.capturing.patches.attributes import Patches

_QUIET = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "DISABLED",
    "COMET_START_ONLINE": "0",
    "COMET_AUTO_LOG_DISABLE": "1",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
_OFFLINE_FLAGS = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
)


def _set_variables(temp: str, allow_network: bool) -> None:
    os.environ.update(_QUIET)
    os.environ["TMPDIR"] = temp
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{temp}/mlruns"
    os.environ["COMET_OFFLINE_DIRECTORY"] = temp
    # Compilers run as child processes, which see the disk and not the overlay.
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{temp}/torch_extensions"
    os.environ["TRITON_CACHE_DIR"] = f"{temp}/triton"
    if not allow_network:
        os.environ.update(_OFFLINE)
        for name in _PROXIES:  # A proxy on this machine would lead out of it.
            os.environ.pop(name, None)
            os.environ.pop(name.upper(), None)


def prepare(patches: Patches, temp: str, allow_network: bool) -> None:
    """Set the variables and flags that keep libraries quiet and temporary files in `temp`."""
    _set_variables(temp, allow_network)
    patches.set(tempfile, "tempdir", temp)
    # The import system writes byte code past `open`.
    patches.set(sys, "dont_write_bytecode", True)
    if not allow_network:
        for name, flag in _OFFLINE_FLAGS:  # Already imported, they have read the variables.
            if (module := sys.modules.get(name)) is not None and hasattr(module, flag):
                patches.set(module, flag, True)


class ProcessState:
    """What a script may change about the process, remembered at construction."""

    def __init__(self) -> None:
        self._cwd = os.getcwd()  # noqa: PTH109
        self._environ = dict(os.environ)
        self._lists = [(x, list(x)) for x in (sys.path, sys.argv)]
        self._argv = sys.argv
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        root = logging.getLogger()
        self._logging = (root.level, list(root.handlers), list(root.filters))
        self._signals = {n: signal.getsignal(n) for n in signal.valid_signals()}
        self._random: list[tuple[Callable[[Any], None], Any]] = [
            (random.setstate, random.getstate())
        ]
        if "numpy" in sys.modules:
            import numpy as np

            self._random.append((np.random.set_state, np.random.get_state()))

    def restore(self) -> None:
        """Put back directory, environment, paths, signals, the root logger, warnings and seeds."""
        os.chdir(self._cwd)
        for name in os.environ.keys() - self._environ.keys():
            del os.environ[name]
        os.environ.update(self._environ)
        sys.argv = self._argv
        for live, before in self._lists:
            live[:] = before
        self._warnings.__exit__(None, None, None)
        root = logging.getLogger()
        root.setLevel(self._logging[0])
        root.handlers[:], root.filters[:] = self._logging[1], self._logging[2]
        for set_state, state in self._random:
            set_state(state)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._signals.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
