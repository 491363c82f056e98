"""Puts stand-ins and rules in place for one capture."""

from __future__ import annotations

import functools
import logging
import runpy
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import Adapter, ImportWatcher
from memplan.capturing.standins import (
    compiled_kernels,
    hub_kernels,
    kernels,
    launch,
    registered_attention,
    rollouts,
    subclasses,
    transformer_engine,
)
from memplan.capturing.standins.finder import (
    DISTRIBUTIONS,
    INSTALL,
    VERSIONS,
    StandInFinder,
    advice,
    has_stand_in,
    installed,
    known_version,
)
from memplan.capturing.standins.registry import (
    RuleActor,
    function_names,
    run_python_of_module,
    unused,
)
from memplan.capturing.standins.rules import running
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError, MemplanError, UsageError


def _not_expected(record: logging.LogRecord) -> bool:
    """The library of CUDA kernels cannot be loaded, and is not needed."""
    return "library load error" not in str(record.msg)


_SHOWN = 5
"""Rules that were not used: a library may bring many."""


class StandIns:
    """What stands in for what in one capture."""

    def __init__(self, packages: Iterable[str]) -> None:
        """`packages`: names of packages, and paths of files of rules. Raises UsageError for a name
        without a stand-in, and a file that is not there or fails."""
        packages = list(packages)
        self._files = [name for name in packages if name.endswith(".py")]
        modules = {name: module for module, name in DISTRIBUTIONS.items()}
        asked = [name.partition("==") for name in packages if name not in self._files]
        asked = [(name.replace("-", "_"), equal, version) for name, equal, version in asked]
        asked = [(modules.get(name, name), equal, version) for name, equal, version in asked]
        names = [name for name, _, _ in asked]
        for name in names:
            if name not in VERSIONS and not installed(name):
                raise UsageError(
                    f"memplan has no stand-in for {name}",
                    f"it has them for {', '.join(VERSIONS)}; for another package give a file of "
                    "rules (memplan.register_rule, docs/packages.md)",
                )
        for path in self._files:
            if not Path(path).is_file():
                raise UsageError(f"{path}: no such file of rules", "check the path")
        for name, equal, _ in asked:
            if equal and installed(name):
                raise UsageError(
                    f"{name} is installed here, and that is what runs",
                    f"--with {name}, or pip uninstall {name} for a stand-in of another version",
                )
        versions = {name: known_version(name, version) for name, equal, version in asked if equal}
        self.finder = StandInFinder(names, function_names, versions)
        self._kernels: Counter[tuple[str, str, str]] = Counter()

    def install(
        self, stack: ExitStack, patches: Patches, state: CaptureState, watcher: ImportWatcher
    ) -> None:
        """Install stand-ins until the stack unwinds."""
        for path in self._files:
            _run_rules(path)
        self.finder.start()
        stack.callback(self.finder.stop)
        self._kernels = state.kernels
        actor = RuleActor(state, patches, watcher)
        actor.start(kernels.rules())
        stack.callback(actor.stop)
        _follow_functions(patches, state)
        subclasses.install(patches, state)
        transformer_engine.install(stack, self.finder)
        loading = logging.getLogger("bitsandbytes.cextension")
        loading.addFilter(_not_expected)
        stack.callback(loading.removeFilter, _not_expected)
        for name, adapt in self._adapters(patches).items():
            watcher.add(name, adapt)
        generate = partial(rollouts.adapt_generate, patches, state)
        watcher.add("transformers.generation.utils", generate)
        trl = partial(rollouts.adapt_trl, patches, state, self.finder)
        watcher.add("trl.generation.vllm_generation", trl)
        for name, adapt_to in registered_attention.MODULES.items():
            watcher.add(name, partial(adapt_to, patches, state))

    def _adapters(self, patches: Patches) -> dict[str, Adapter]:
        overflow = partial(compiled_kernels.adapt_overflow, patches)
        fetched = partial(hub_kernels.adapt, patches, self.finder)
        return {
            **{f"kernels.{name}": fetched for name in hub_kernels.MODULES},
            **dict.fromkeys(compiled_kernels.OVERFLOW_MODULES, overflow),
            "bitsandbytes.functional": partial(kernels.bitsandbytes.adapt_functional, patches),
            "causal_conv1d.cpp_functions": run_python_of_module,
            "deepspeed.ops.op_builder.builder": partial(compiled_kernels.adapt_deepspeed, patches),
            "torch.cuda._utils": partial(compiled_kernels.adapt_nvrtc, patches),
            "torch.utils.cpp_extension": partial(compiled_kernels.adapt_extensions, patches),
            "triton.runtime.jit": partial(launch.adapt_jit, patches),
            "triton.runtime.autotuner": partial(launch.adapt_autotuner, patches),
            "triton.testing": partial(launch.adapt_testing, patches),
            "triton.runtime.driver": partial(launch.adapt_driver, patches),
            "transformers.integrations.deepspeed": partial(_needs_deepspeed, patches),
            "transformers.modeling_utils": partial(self._asked_for_flash, patches),
            "transformers.utils.quantization_config": partial(self._asked_for_bits, patches),
        }

    def _asked_for_flash(self, patches: Patches, module: types.ModuleType) -> None:
        """A model that is told to use flash-attention raises where that is not installed."""
        model = module.PreTrainedModel
        versions = {2: "flash_attn", 3: "flash_attn_interface"}

        def dispatch(check: Any) -> Any:
            @functools.wraps(check)
            def call(model: Any, *args: Any, **kwargs: Any) -> Any:
                version = kwargs.get("flash_attn_version", args[0] if args else 2)
                self.finder.want(versions.get(version, versions[2]))
                return check(model, *args, **kwargs)

            return call

        for name in ("_flash_attn_can_dispatch", "_flash_attn_2_can_dispatch"):
            if (check := vars(model).get(name)) is not None:
                patches.set(model, name, dispatch(check))

    def _asked_for_bits(self, patches: Patches, module: types.ModuleType) -> None:
        """So does one whose weights are to be quantised by bitsandbytes."""
        config = module.BitsAndBytesConfig
        patches.set(config, "__init__", self._wanting("bitsandbytes", config.__init__))

    def _wanting(self, package: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.finder.want(package)
            return function(*args, **kwargs)

        return call

    def notes(self) -> list[str]:
        """What the user should know of packages that are not here, and of rules."""
        idle = unused(op for op, kernel, _ in self._kernels if kernel == "rule")
        versions = {**VERSIONS, **self.finder.versions}
        notes = [
            f"{package} is not installed here: a stand-in for {package} {versions[package]} took "
            "its place"
            for package in sorted(self.finder.served)
            if has_stand_in(package)
        ]
        notes += [
            f"{where}: {package} is not installed here and the script goes on without it; where "
            f"the job has it, {'pass ' if has_stand_in(package) else ''}{advice(package)}"
            for package, where in self.finder.done_without.items()
            if package not in self.finder.served
        ]
        vllm = sys.modules.get("vllm")
        if vllm is not None and "vllm" not in self.finder.served:
            place = getattr(vllm, "__file__", None) or "this machine"
            notes.append(
                f"vllm of {place} is used, which --with does not replace: what an engine of it "
                "takes of the card is not counted; without it a stand-in counts that"
            )
        notes += [
            f"the rule for {name} ({place}) was never used: the job does not call that, or it has "
            "another name"
            for name, place in idle[:_SHOWN]
        ]
        return notes


def _needs_deepspeed(patches: Patches, module: types.ModuleType) -> None:
    """A job with a configuration for DeepSpeed is none without it."""
    config = module.HfDeepSpeedConfig
    make = config.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not installed("deepspeed"):
            state = running()
            raise CaptureError(
                f"{(state.source() if state else '') or 'the script'}: the job wants DeepSpeed, "
                "which is not installed here, and only its own Python says what it takes",
                INSTALL["deepspeed"],
            )
        make(self, *args, **kwargs)

    patches.set(config, "__init__", init)


def _run_rules(path: str) -> None:
    try:
        runpy.run_path(path)
    except MemplanError as error:
        raise type(error)(f"{_place(path, error)}: {error.message}", error.hint) from error
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{_place(path, error)}: the file of rules raised {type(error).__name__}: {error}",
            "it must run by itself: memplan.register_rule is all it needs",
        ) from error


def _place(path: str, error: BaseException) -> str:
    """The last line of the file that was running."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f"{path}:{frames[-1].lineno}" if frames else path


def _follow_functions(patches: Patches, state: CaptureState) -> None:
    """The forward of a `torch.autograd.Function` runs without gradients, in the job's forward."""
    context = state.context
    apply: Any = vars(torch.autograd.Function)["apply"]  # of Python, or native since 2.15

    def follow(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = apply.__get__(None, cls)
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        context.in_function += 1
        try:
            return call(*args, **kwargs)
        finally:
            context.in_function -= 1

    patches.set(torch.autograd.Function, "apply", classmethod(follow))
