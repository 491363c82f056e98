"""An installed Transformer Engine: its Python runs above a stand-in for its compiled part."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch.utils._triton import has_triton_package

from memplan.capturing.patches.imports import WrappedLoader
from memplan.capturing.standins.finder import StandInFinder, _empty, installed
from memplan.capturing.standins.registry import run_python_of_module
from memplan.types.errors import CaptureError

PACKAGE = "transformer_engine"
_COMMON = "transformer_engine.common"
_PYTHON = "transformer_engine.pytorch."
_ONNX = "transformer_engine.pytorch.onnx_extensions"
"""A module for export only; no training calls it."""
_NEEDED = ("einops", "pydantic")
_WITHOUT_LIBRARIES, _RELEASE = "NVTE_PROJECT_BUILDING", "NVTE_RELEASE_BUILD"
"""Transformer Engine's own word for: load no library of CUDA's."""


class _CommonLoader(WrappedLoader):
    """Loads no library, and gives the stand-in where the compiled part is asked for."""

    def __init__(self, loader: Any, standins: StandInFinder) -> None:
        super().__init__(loader)
        self._standins = standins

    def exec_module(self, module: ModuleType) -> None:
        missing = [name for name in _NEEDED if not installed(name)]
        if missing:
            raise CaptureError(
                f"Transformer Engine is installed here without {' and '.join(missing)}, which its "
                "Python needs",
                f"pip install {' '.join(missing)}",
            )
        held = {name: os.environ.pop(name, None) for name in (_WITHOUT_LIBRARIES, _RELEASE)}
        os.environ[_WITHOUT_LIBRARIES] = "1"
        try:
            super().exec_module(module)
        finally:
            del os.environ[_WITHOUT_LIBRARIES]
            os.environ.update({name: value for name, value in held.items() if value is not None})
        if not hasattr(module, "load_framework_extension"):
            raise CaptureError(
                "this version of Transformer Engine loads its compiled part in a way of its own",
                "install a newer one to estimate (pip install -U transformer-engine)",
            )
        # Its Python launches Triton kernels, and PyTorch for CUDA brings Triton along.
        has_triton_package()  # remembers the answer: PyTorch itself goes on without
        self._standins.want("triton")
        module.load_framework_extension = _load  # type: ignore[attr-defined]


def _load(framework: str) -> None:
    if framework != "torch":
        raise FileNotFoundError(f"Could not find shared object file for {framework}")
    importlib.import_module("transformer_engine_torch")


class _PythonLoader(WrappedLoader):
    """A loader for the operators that are written in Python; these run."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        run_python_of_module(module)


class _Finder:
    """Comes first: `transformer_engine.common` would load libraries that need a driver."""

    def __init__(self, standins: StandInFinder) -> None:
        self._standins = standins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import protocol."""
        if fullname == _ONNX and not installed("onnxscript"):
            return _empty(fullname)
        if fullname != _COMMON and not fullname.startswith(_PYTHON):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None and found.loader is not None:
            of_python = _PythonLoader(found.loader)
            common = fullname == _COMMON
            found.loader = _CommonLoader(found.loader, self._standins) if common else of_python
        return found


def install(stack: ExitStack, standins: StandInFinder) -> None:
    """Install it until the stack unwinds."""
    before = set(sys.modules)
    finder: Any = _Finder(standins)
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)
    stack.callback(_forget, before)


def _forget(before: set[str]) -> None:
    """What was imported above the stand-in holds tensors without data: buffers of its caches."""
    for name in set(sys.modules) - before:
        if name == PACKAGE or name.startswith(PACKAGE + "."):
            del sys.modules[name]
