"""Inductor as far as the code that it would run, with kernels that compute nothing.

Inductor lowers and fuses for the chosen card and writes the Python that allocates buffers, launches
kernels and lets go of buffers (`torch/_inductor/codegen/wrapper.py`). That code runs here as it is;
only its allocations make fake tensors and its kernels do nothing. So what a compiled graph keeps,
reuses and never materialises is Inductor's own decision. Triton is not needed: its sources are
written and not compiled.
"""

from __future__ import annotations

import re
import types
from contextlib import ExitStack
from typing import Any

from torch._inductor import async_compile, compile_fx, graph, select_algorithm
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes import pad_mm

from memplan.capturing.compiled import card, launches
from memplan.capturing.compiled.cudagraphs import Pool
from memplan.capturing.compiled.origins import origins
from memplan.capturing.compiled.tuning import Tuning
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.recording.context import GENERATED, ORIGINS
from memplan.capturing.state import CaptureState
from memplan.types.device import DeviceProfile

_TRITON_IMPORT = re.compile(r"^(?:import triton|from triton)\b.*$", re.MULTILINE)
_SETTINGS: dict[str, Any] = {
    # What another run cached is not for this card, and what this one makes is not for another.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "compile_threads": 1,
    "cpp_wrapper": False,
    "triton.autotune_at_compile_time": False,
    # Nothing can be timed here.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_kernel": False,
    "benchmark_fusion": False,
}
_TUNES_PRODUCTS = ("max_autotune", "max_autotune_gemm")


def install(
    stack: ExitStack, patches: Patches, state: CaptureState, profile: DeviceProfile
) -> None:
    """Patch Inductor until `patches.undo()` and `stack` is closed."""
    from torch._inductor import cudagraph_trees  # imports what only a build for CUDA has

    if state.device_type == "cuda":
        card.install(patches)
    compiler = async_compile.AsyncCompile
    for name, maker in launches.kernel_makers(state).items():
        patches.set(compiler, name, maker)
    patches.set(compiler, "wait", lambda _self, _scope: None)
    for name in ("wakeup", "warm_pool"):
        patches.set(compiler, name, staticmethod(lambda: None))
    patches.set(select_algorithm, "PyCodeCache", _Templates)
    tuning = Tuning(state, profile)
    patches.set(pad_mm, "has_triton", lambda: True)
    patches.set(pad_mm, "_should_pad", tuning.pads)
    pool = Pool(state)
    patches.set(compile_fx, "cudagraphify", pool.cudagraphify)
    patches.set(cudagraph_trees, "cudagraphify_impl", pool.cudagraphify_impl)
    patches.set(graph.GraphLowering, "compile_to_module", _loader(state, tuning))
    compile_for_real: Any = compile_fx.compile_fx

    inside = False

    def compile_graph(
        model: Any, inputs: Any, *args: Any, config_patches: Any = None, **kwargs: Any
    ) -> Any:
        nonlocal inside
        if inside:  # it calls itself once its settings are in force
            return compile_for_real(model, inputs, *args, config_patches=config_patches, **kwargs)
        asked = dict(config_patches or {})
        tuning.products |= any(
            asked.get(name, getattr(inductor_config, name)) for name in _TUNES_PRODUCTS
        )
        settings = {**asked, **_SETTINGS}
        inside = True
        try:
            return compile_for_real(model, inputs, *args, config_patches=settings, **kwargs)
        finally:
            inside = False

    patches.set(compile_fx, "compile_fx", compile_graph)


class _Templates(PyCodeCache):
    """Replaces Inductor's loader of a template's kernel (flex attention): nothing is loaded."""

    load: Any = staticmethod(
        lambda _code, key="", **_options: types.SimpleNamespace(__file__="<template>", key=key)
    )


def _loader(state: CaptureState, tuning: Tuning) -> Any:
    """Replaces `GraphLowering.compile_to_module`, which writes and imports a file."""

    def compile_to_module(lowering: Any) -> Any:
        code, _kernels = lowering.codegen()
        module: Any = types.ModuleType("memplan_compiled_graph")
        module.__file__ = GENERATED
        module.__dict__.update(lowering.constants)
        module.__dict__.update(lowering.torchbind_constants)
        source = _TRITON_IMPORT.sub("", code.value)
        module.__dict__[ORIGINS] = origins(lowering, source)
        exec(compile(source, module.__file__, "exec"), module.__dict__)
        module.__dict__.update(launches.primitives(state))
        module.call = tuning.before_first(module.call, lowering)
        return module

    return compile_to_module
