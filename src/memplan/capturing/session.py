"""One capture: everything that is in place while a job runs on the fake device."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.nested._internal import sdpa as nested_attention
from torch.utils import _python_dispatch
from torch.utils.data import dataloader

import memplan
from memplan.capturing.compiled import Compiled
from memplan.capturing.cuda import nvml, torch_cuda
from memplan.capturing.cuda.device import fake_cuda_device, self_test
from memplan.capturing.cuda.fake_cuda import FakeCuda
from memplan.capturing.distributed import cards, files, peers
from memplan.capturing.distributed.install import Distributed
from memplan.capturing.distributed.place import check_place, visible_devices
from memplan.capturing.enough import EnoughSeen
from memplan.capturing.fake.arguments import tensors_among
from memplan.capturing.host.process import capture_peak_bytes
from memplan.capturing.job import other_processes
from memplan.capturing.job.caught import Caught
from memplan.capturing.mode import CaptureMode
from memplan.capturing.operators import (
    assumed,
    data_dependent,
    missing_shapes,
    one_kernel,
    operand_layout,
    shape_rules,
    sparse,
)
from memplan.capturing.operators.attention import Attention
from memplan.capturing.operators.kernel_memory import KernelMemory
from memplan.capturing.operators.recurrent import Recurrent
from memplan.capturing.options import CaptureOptions
from memplan.capturing.parity import formulas
from memplan.capturing.parity.additions import InPlaceAdditions
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.patches.internals import require
from memplan.capturing.patches.job_observer import JobObserver
from memplan.capturing.sandbox import overlay, report_device
from memplan.capturing.standins import adapters
from memplan.capturing.standins.install import StandIns
from memplan.capturing.state import CaptureState
from memplan.capturing.tensors import (
    constructors,
    host_methods,
    lazy_modules,
    parameters,
    storages,
)
from memplan.capturing.training.ending import Ending
from memplan.capturing.training.host_draws import HostDraws
from memplan.capturing.training.repeats import Repeats
from memplan.capturing.training.watcher import HandUpdates, StepWatcher
from memplan.types.alloc_conf import conf_in
from memplan.types.errors import CaptureError
from memplan.types.step_time import InputTime
from memplan.types.trace import KernelChoice, Role, Trace, TraceMeta

aten = torch.ops.aten

_FOLLOWED = {
    (torch.nn.Module, "__call__"),
    (threading.Thread, "run"),
    (dataloader._BaseDataLoaderIter, "__next__"),
    (torch.autograd, "_engine_run_backward"),
    (torch.optim.Optimizer, "__init__"),
}
"""What is patched to see where the job is, and to end it."""

_active: CaptureSession | None = None


class CaptureSession:
    """A context manager in which CUDA is fake and all requests are recorded. Only one can be active
    in a process. `trace()` gives what has been recorded, also afterwards."""

    def __init__(
        self, options: CaptureOptions, method: str | None = None, *, stop: bool = True
    ) -> None:
        """`method` forces `fake-cuda`, `fake-cpu` or `cuda` (fake tensors in a process that has
        CUDA); None takes fake CUDA where it works. `stop`:
        end the job by `EnoughSeen` once enough has been seen."""
        require("capturing")
        self.options = options
        # Before the test: a process that ends right after a backward pass may be aborted by the
        # autograd engine's thread, which then waits for the interpreter.
        self.stand_ins = StandIns(options.packages)
        if options.place is not None:
            check_place(options.place)
        # Not where CUDA may be real and at work: the test puts a stand-in in its place.
        test = self_test() if method is None else None
        self.method = method or ("fake-cuda" if test is not None and test.ok else "fake-cpu")
        self._additions = InPlaceAdditions()
        self.state = CaptureState(
            device_type=self.method.removeprefix("fake-"),
            routing=options.routing,
            handlers={
                **data_dependent.HANDLERS,
                **formulas.HANDLERS,
                **self._additions.handlers(),
                **one_kernel.HANDLERS,
                **shape_rules.HANDLERS,
                **sparse.HANDLERS,
            },
            observers={**assumed.OBSERVERS, **self._additions.observers()},
        )
        self._mode = CaptureMode(self.state, self._additions)
        self._draws = HostDraws()
        self.ending = Ending(self.state, self._draws, self._scan_seconds(options))
        self.steps = StepWatcher(self.state, options.steps, self.ending if stop else None)
        self.repeats = Repeats(self.state)
        self.by_hand = HandUpdates(self.state, self.steps)
        self.caught = Caught(self.state)
        self.notes: list[str] = []
        self._inputs: list[InputTime] = []
        if test is not None and test.too_late:
            raise CaptureError(
                "this process has already run a backward pass, and PyTorch looks for devices only "
                "before the first one",
                "estimate first, in a fresh process or notebook kernel, or use the command line",
            )
        if test is not None and not test.ok:
            self.notes.append(f"fake CUDA is not available ({test.detail}): traced on the CPU")
        if peers.current().answering:
            self.state.host.enabled = False  # nobody asks for this rank's memory
        self._alloc_conf = ""
        self._cuda: FakeCuda | None = None
        self._distributed: Distributed | None = None
        self._stack = ExitStack()
        self._patches = Patches()
        self._observer = JobObserver(self._patches)

    def __enter__(self) -> CaptureSession:
        global _active
        if _active is not None:
            raise RuntimeError("a capture is already running in this process")
        with ExitStack() as stack:
            patches = self._patches
            # A fake tensor that is asked for its device imports this: now, not under our patches.
            if torch.distributed.is_available():
                importlib.import_module("torch.distributed.tensor")
            stack.callback(patches.undo)
            stack.callback(patches.forget_in_the_job, frozenset(sys.modules))
            adapters.make_torchvision_importable()
            watcher = ImportWatcher(adapters.adapters(patches, self.ending))
            stack.callback(watcher.stop)
            watcher.start()
            if self.method == "fake-cuda":
                stack.enter_context(fake_cuda_device())
                self._cuda = torch_cuda.install(
                    patches,
                    self.state,
                    self.options.profile,
                    visible_devices(self.options.place, self.options.environment),
                    alone=self.options.place is None,
                )
                watcher.add("pynvml", nvml.adapter(patches, self._cuda))
                self._install_kernels(stack, patches)
            elif self.method == "cuda":  # PyTorch itself chooses the kernels
                self._watch_kernels()
            self.stand_ins.install(stack, patches, self.state, watcher)
            parameters.install(patches, self.state)
            if self.options.steps is not None or self.options.scan_seconds:
                self._draws.install(patches, self.state)  # where the batches' order counts
            lazy_modules.install(patches, self.state)
            if self.method != "cuda":  # there the job's own processes run
                self._distributed = Distributed(self.state, self.options, self._cuda)
                self._distributed.install(stack, patches, watcher)
            host_methods.install(patches, self.state)
            storages.install(patches, self.state)
            constructors.install(patches)
            shape_rules.install(patches, self.state)
            self._patch_framework(patches)
            if self.method != "cuda":
                compiled = Compiled(patches, self.state, self.options.profile)
                stack.callback(compiled.undo)
                compiled.install()
            if self.steps.ending is not None:
                self.ending.install(patches, self._observer)
                stack.callback(self.ending.close)
            self._observer.on_backward(self.by_hand.around_backward)
            self._observer.on_backward(self.caught.noted)
            stack.callback(self._observer.close)
            self.steps.install(patches, self._observer)
            patches.reach_into_the_job()
            stack.enter_context(constructors.known_to_torchscript(patches))
            lift_before = torch._C._only_lift_cpu_tensors()
            torch._C._set_only_lift_cpu_tensors(True)
            stack.callback(torch._C._set_only_lift_cpu_tensors, lift_before)
            if self._cuda is not None:
                self._cuda.replayed_step = self.steps.replayed
            stack.enter_context(self._mode)
            self._calibrate()
            _active = self
            stack.callback(_deactivate)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        if exc[:1] == (None,):
            with suppress(EnoughSeen):
                self.by_hand.look(at_end=True)
        self._alloc_conf = self._settings_in_force()
        self._stack.__exit__(*exc)

    def time_input(self) -> None:
        """Measure the data loaders, once the session is over. They give batches that nobody will
        see: not where the job goes on."""
        if self.steps.completed and not peers.current().answering:
            self._inputs = self.ending.inputs.measured(*self._usual_steps())

    def _usual_steps(self) -> tuple[int, int]:
        """First and one past the last of the steps that stand for all others."""
        done = self.steps.completed
        return self.steps.repeats or (max(done - 1, 0), max(done, 1))

    @staticmethod
    def _scan_seconds(options: CaptureOptions) -> float:
        """None for a rank that only answers another one, nor where somebody chose the steps."""
        chosen = options.steps is not None or peers.current().answering
        return 0.0 if chosen else options.scan_seconds

    def _patch_framework(self, patches: Patches) -> None:
        context = self.state.context
        module_call = torch.nn.Module.__call__
        thread_run = threading.Thread.run
        others = peers.current()
        device_type = self.state.device_type

        # PyTorch's profiler (`with_stack`) takes the local `self` of this function for the module.
        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not context.in_module:
                if others.answering:
                    if not others.has_told(cards.KEY):
                        cards.tell_of(self, device_type)
                    if others.wants(files.KEY):
                        files.tell_of(others, overlay())
                return root_call(self, args, kwargs)
            context.enter_module(self)
            try:
                return module_call(self, *args, **kwargs)
            finally:
                context.leave_module()

        def root_call(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            # A model has memory on the device, or asks for some. A transform of data does neither.
            model = self._name_parameters(module)
            builder = self.state.recorder.builder
            begun, newest = len(builder), builder.newest_storage
            if model:
                self._model_runs(module, begun)
            if model or (torch.is_grad_enabled() and self._given_memory(args, kwargs)):
                context.model_called()
            context.enter_module(module)
            try:
                with self.caught.noted():
                    if model and self._may_repeat():
                        result = self.repeats.call(
                            module,
                            args,
                            kwargs,
                            partial(module_call, module, *args, **kwargs),
                            in_steps=self.steps.completed > 0 and not self.ending.draining,
                        )
                    else:
                        result = module_call(module, *args, **kwargs)
            finally:
                context.leave_module()
            if not model and builder.newest_storage > newest:
                self._model_runs(module, begun)
            return result

        def run(thread: threading.Thread) -> None:
            try:
                with self._mode:  # dispatch modes belong to a thread
                    thread_run(thread)
            except Exception:
                # Once all is seen, a loader's workers are gone before its thread that pins.
                if not self.state.recorder.finished:
                    raise

        patches.set(torch.nn.Module, "__call__", call)
        patches.set(threading.Thread, "run", run)
        patches.set(fake_tensor.log, "disabled", True)  # what it says there, it raises too
        patches.set(fake_tensor, "init_gpu_context", lambda device: None)

    def _install_kernels(self, stack: ExitStack, patches: Patches) -> None:
        attention = Attention(self.state, self.options.profile)
        library = attention.install()
        stack.callback(library._destroy)
        stack.callback(missing_shapes.install()._destroy)
        stack.callback(one_kernel.install()._destroy)
        stack.callback(operand_layout.install(patches)._destroy)
        self.state.handlers[aten.scaled_dot_product_attention.default] = attention.handler()
        patches.set(nested_attention, "_select_sdp_backend", attention.select)
        memory = self._watch_kernels()
        recurrent = Recurrent(self.state, self.options.profile, memory)
        stack.callback(recurrent.install(patches)._destroy)
        self.state.handlers.update(recurrent.handlers())

    def _watch_kernels(self) -> KernelMemory:
        memory = KernelMemory(self.state, self.options.profile)
        for func, observer in memory.observers().items():
            self.state.observe(func, observer)
        self.state.recordings.update(memory.recordings())
        return memory

    def _model_runs(self, model: torch.nn.Module, begun: int) -> None:
        """One that no other module called, since event `begun`."""
        training = torch.is_grad_enabled()
        if training:
            self.steps.forward(begun)
            self.repeats.over()
        self.ending.model_runs(model, training=training)

    def _may_repeat(self) -> bool:
        """Whether what runs may be an evaluation or a sampler that is not run in full, where nobody
        said what is to be run."""
        if torch.is_grad_enabled() or self.state.context.in_optimizer:
            return False
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return False
        return self.steps.ending is not None and self.options.steps is None

    def _name_parameters(self, root: torch.nn.Module) -> bool:
        """Whether any is on the device."""
        there = False
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            self.state.role_of(tensor, Role.PARAMETER, name)
            there = there or tensor.device.type == self.state.device_type
        return there

    def _given_memory(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a tensor on the device is among a call's arguments."""
        fakes, _ = tensors_among(args, kwargs)
        return any(tensor.device.type == self.state.device_type for tensor in fakes)

    def new_tensor(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor for a checkpoint read back: its data were never written."""
        elements = nbytes // dtype.itemsize
        if device.type == self.state.device_type:
            return torch.empty(elements, dtype=dtype, device=device)
        return self.state.blank([elements], dtype, device)

    def _calibrate(self) -> None:
        """See `InPlaceAdditions.calibrate`; what this allocates is discarded."""
        state = self.state

        def backward() -> None:
            leaf = torch.nn.Parameter(torch.empty(2, device=state.device_type))
            value = leaf * 1.0
            (value * 2.0 + value * 3.0).sum().backward()

        peers.has_computed()
        self._additions.calibrate(backward)
        state.context.backward_seen = False
        state.recorder.restart()
        state.host.restart()

    def leave(self) -> None:
        """To be called in a forked child: the job is not followed on, but CUDA's answers stay."""
        while _python_dispatch._get_current_dispatch_mode_stack():
            _python_dispatch._pop_mode()
        self._observer.close()
        for owner, name, before in self._patches.originals():
            if (owner, name) in _FOLLOWED:
                setattr(owner, name, before)

    def _settings_in_force(self) -> str:
        """Allocator settings of the environment and of the script, in PyTorch's order: of a key
        that both set the script's counts."""
        around = conf_in(os.environ)
        own = self._cuda.alloc_conf if self._cuda is not None else ""
        return ",".join(conf.strip(" ,") for conf in (around, own) if conf.strip(" ,"))

    def trace(self, command: list[str] | None = None) -> Trace:
        """The trace so far. Raises the error of memplan's that the job caught while it trained."""
        recorder = self.state.recorder
        recorder.flush()
        self.caught.settle()
        others = self._distributed
        place = self.options.place
        batches, samples = self.ending.step_batches.in_steps(*self._usual_steps())
        meta = TraceMeta(
            memplan_version=memplan.__version__,
            torch_version=str(torch.__version__),
            method=self.method,
            gpu=self.options.profile.name,
            command=command or [],
            alloc_conf=self._alloc_conf or self._settings_in_force(),
            optimizer_steps=self.steps.completed,
            stop_reason=self.steps.stop_reason or "the job ended by itself",
            steady_steps=list(self.steps.repeats or ()),
            batches=self.ending.batches,
            inputs=self._inputs,
            batches_per_step=batches,
            samples_per_step=samples,
            assumptions=self.state.assumptions.listed(),
            kernels=[
                KernelChoice(op=op, kernel=kernel, reason=reason, count=count)
                for (op, kernel, reason), count in self.state.kernels.most_common()
            ],
            stages=list(self.state.stages),
            engines=list(self.state.engines),
            notes=[
                *self.notes,
                *self.stand_ins.notes(),
                *self.steps.notes(),
                *self.repeats.notes(),
            ],
            capture_peak_bytes=capture_peak_bytes(),
            host=self.state.host.capture(place.local_world_size if place is not None else 1),
            communicators=others.communicators() if others is not None else [],
        )
        trace = recorder.builder.build(meta)
        if place is None or self._cuda is None:
            return trace
        return cards.with_card(trace, place, self.state.devices, chosen=self._cuda.chosen)


def _deactivate() -> None:
    global _active
    _active = None


def _leave_in_child() -> None:
    """A forked worker prepares real data: it has no business with the fake device."""
    if _active is not None:
        _active.leave()
        other_processes.refuse_in_fork(report_device)


os.register_at_fork(after_in_child=_leave_in_child)
