"""Puts what a distributed job needs in place for the length of a capture."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from memplan.capturing.cuda.fake_cuda import FakeCuda
from memplan.capturing.distributed import dtensor, flat_states, gathered, peers, uneven
from memplan.capturing.distributed.batches import Batches
from memplan.capturing.distributed.broadcasts import Broadcasts
from memplan.capturing.distributed.checkpoint import Checkpoints
from memplan.capturing.distributed.collectives import Collectives
from memplan.capturing.distributed.communicators import DEFAULT_LOCAL, Communicators
from memplan.capturing.distributed.functional import FunctionalCollectives
from memplan.capturing.distributed.groups import ProcessGroupNCCL, ProcessGroups, register_backend
from memplan.capturing.distributed.objects import ObjectCollectives
from memplan.capturing.distributed.pipeline import Pipelines
from memplan.capturing.distributed.place import environment, rank_environment
from memplan.capturing.distributed.spawn import make_spawn
from memplan.capturing.distributed.stores import LocalStore
from memplan.capturing.options import CaptureOptions
from memplan.capturing.patches.attributes import Patches, of_the_job
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.patches.internals import require
from memplan.capturing.sandbox.patches import release_by_name, replace_by_name
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError
from memplan.types.trace import Communicator


class Distributed:
    """What a capture does about other processes of the same job."""

    def __init__(self, state: CaptureState, options: CaptureOptions, cuda: FakeCuda | None) -> None:
        self.options = options
        self.state = state
        place = options.place
        local = place.local_world_size if place is not None else DEFAULT_LOCAL
        numbered = (lambda: cuda.new_stream_number(0)) if cuda is not None else (lambda: 0)
        self._communicators = Communicators(numbered, local)

    def install(self, stack: ExitStack, patches: Patches, watcher: ImportWatcher) -> None:
        """Install it until the stack unwinds, which happens before `patches.undo()`."""
        place = self.options.place
        if place is not None:
            variables = rank_environment(place, self.options.environment)
            stack.enter_context(environment(variables))
        elif self.options.environment:
            stack.enter_context(environment(self.options.environment))
        if place is not None and place.local_rank < self.state.devices:
            self.state.own_device = place.local_rank
        if not distributed.is_available():
            return
        require("capturing/distributed")
        dtensor.install(patches, watcher)
        gathered.install(patches, watcher, self.state)
        flat_states.install(patches, watcher, self.state)
        _refuse_symmetric_memory(patches, watcher, self.state)
        uneven.install(patches, watcher)
        register_backend()
        groups = ProcessGroups(self.state, place, self._communicators)
        broadcasts = Broadcasts(self.state, peers.current())
        broadcasts.install(stack)
        collectives = Collectives(self.state, self._communicators, broadcasts)
        self.state.collectives.update(collectives.handlers())
        self.state.collectives[torch.ops.aten.is_pinned.default] = _is_pinned
        self.state.observe(torch.ops.aten.copy_.default, _learn_copied)
        functional = FunctionalCollectives(self.state, collectives)
        functional.install(patches, watcher)
        stack.callback(functional.clear)
        stack.callback(collectives.works.clear)
        Pipelines(self.state, self._communicators, peers.current()).install(patches, watcher)
        Checkpoints(self.state).install(patches, watcher)
        stack.callback(groups.close)
        batches = Batches(collectives)
        batches.install(patches)
        objects = ObjectCollectives(self.state, broadcasts)
        self._replace(stack, patches, groups, batches, objects)

    def _replace(
        self,
        stack: ExitStack,
        patches: Patches,
        groups: ProcessGroups,
        batches: Batches,
        objects: ObjectCollectives,
    ) -> None:
        spawn_module = sys.modules["torch.multiprocessing.spawn"]
        originals: dict[str, tuple[Any, Any]] = {}
        for name in ("init_process_group", "new_group", "split_group", "get_backend"):
            originals[name] = (getattr(c10d, name), getattr(groups, name))
        for name in ("get_backend_config", "monitored_barrier"):
            originals[name] = (getattr(c10d, name), getattr(groups, name))
        for name, stand_in in objects.stand_ins().items():
            originals[name] = (getattr(c10d, name), stand_in)
        batched = batches.batch_isend_irecv(c10d.batch_isend_irecv)
        originals["batch_isend_irecv"] = (c10d.batch_isend_irecv, batched)
        originals["is_nccl_available"] = (c10d.is_nccl_available, lambda: True)
        for name in ("TCPStore", "FileStore"):
            originals[name] = (getattr(_distributed_c10d, name), LocalStore)
        for name in ("spawn", "start_processes"):
            original = getattr(spawn_module, name)
            originals[name] = (original, make_spawn(self.state, self.options.place, original))
        stand_ins = {id(old): new for old, new in originals.values()}
        replace_by_name(patches, stand_ins, _not_of_the_job)
        # Modules that are imported meanwhile take the stand-ins by name.
        back = {id(new): old for old, new in originals.values() if new is not LocalStore}
        stack.callback(lambda: release_by_name(back, _not_of_the_job))
        stack.callback(lambda: originals.clear())  # alive until then: they are known by their ids
        # The timer of DDP's statistics is CUDA's own, and absent from a build without it.
        patches.set(_distributed_c10d.Logger, "set_runtime_stats_and_log", lambda _logger: None)
        for module in (distributed, c10d, _distributed_c10d):
            if not hasattr(module, "ProcessGroupNCCL"):
                patches.set(module, "ProcessGroupNCCL", ProcessGroupNCCL)

    def communicators(self) -> list[Communicator]:
        """The NCCL communicators so far."""
        place = self.options.place
        rank = place.rank if place is not None else 0
        return self._communicators.listed(rank)


def _not_of_the_job(name: str, module: object) -> bool:
    """The session itself looks through all others for what it patches."""
    return not of_the_job(name, module)


def _is_pinned(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """C++ asks for the buffers that it has pinned, which needs a driver."""
    return bool(args[0].device.type == "cpu")


def _learn_copied(state: CaptureState, _func: Any, args: Any, _kwargs: Any, _result: Any) -> None:
    """A tensor that is filled whole from a known one is known: so DDP tells its buckets."""
    target, source = args[0], args[1]
    if not state.values.knows(target) and source.numel() == target.numel():
        state.values.follow(target, source)


def _refuse_symmetric_memory(patches: Patches, watcher: ImportWatcher, state: CaptureState) -> None:
    """`torch.distributed._symmetric_memory`: before C++ refuses it, until `patches.undo()`."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise CaptureError(
            f"{state.source()}: symmetric memory, which lies outside PyTorch's allocator and which "
            "other ranks' GPUs map, cannot be followed",
            "leave it out when estimating: the functional collectives do the same without it",
        )

    def adapt(module: ModuleType) -> None:
        for name in ("empty", "rendezvous", "get_symm_mem_workspace"):
            if hasattr(module, name):
                patches.set(module, name, refuse)

    watcher.add("torch.distributed._symmetric_memory", adapt)
