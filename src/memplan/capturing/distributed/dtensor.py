"""What distributed tensors cost a capture, and what they remember from one to the next."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher

_MODULE = "torch.distributed.tensor._sharding_prop"
_FLAG = "_propagate_use_strided_shard_flag"
_MESHES = "torch.distributed.device_mesh"
_captures = itertools.count(1)


def install(patches: Patches, watcher: ImportWatcher) -> None:
    """Install it until `patches.undo()`."""
    # Which device `cuda` is, as another rank: PyTorch's own fake modes remember it for the process.
    FakeTensorMode.cache_clear()
    _look_once(patches, watcher)
    _tell_meshes_apart(patches, watcher)


def _tell_meshes_apart(patches: Patches, watcher: ImportWatcher) -> None:
    """Two meshes of the same ranks are equal, whichever rank holds them, and PyTorch keeps, in
    every thread, how it divides a tensor over a mesh, with that mesh's groups and place. A mesh of
    another capture, as another rank, would be found there. Meshes of ranks that are threads of one
    process are told apart by a number."""
    number = -next(_captures)

    def adapt(module: ModuleType) -> None:
        mesh = getattr(module, "DeviceMesh", None)
        if mesh is None:
            return
        original = mesh.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._thread_id = number
            self._hash = None

        patches.set(mesh, "__init__", init)

    watcher.add(_MESHES, adapt)


def _look_once(patches: Patches, watcher: ImportWatcher) -> None:
    """An optimizer's operator on lists of n tensors looks, for each element, through all n of them
    for a kind of placement that only tensor parallelism under FSDP makes: once is enough.
    """

    def adapt(module: ModuleType) -> None:
        original = getattr(module, _FLAG, None)
        strided = getattr(module, "_StridedShard", None)
        if original is None or strided is None:
            return
        asked: list[Any] = [None, False]

        def look_once(op_strategy: Any, op_schema: Any) -> None:
            if op_schema is not asked[0]:
                asked[:] = (
                    op_schema,
                    any(
                        isinstance(placement, strided)
                        for spec in op_schema.args_spec
                        for placement in spec.placements
                    ),
                )
            if asked[1]:
                original(op_strategy, op_schema)

        patches.set(module, _FLAG, look_once)

    watcher.add(_MODULE, adapt)
