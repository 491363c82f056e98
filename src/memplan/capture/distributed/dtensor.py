"""What distributed tensors cost a capture: work repeated for every element of a list."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from memplan.capture.importing import ImportWatcher
from memplan.capture.patching import Patches

_MODULE = "torch.distributed.tensor._sharding_prop"
_FLAG = "_propagate_use_strided_shard_flag"


def install(patches: Patches, watcher: ImportWatcher) -> None:
    """Until `patches.undo()`.

    An optimizer's operator on lists of n tensors looks, for each element, through all n of them for
    a kind of placement that only tensor parallelism under FSDP makes: once is enough.
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
