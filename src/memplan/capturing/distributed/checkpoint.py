"""Distributed checkpoints (`torch.distributed.checkpoint`): this rank's part of them.

The coordinator plans for all ranks from what each of them sends. Only this rank's part exists
here, so every rank plans and writes its own, as the coordinator of itself. An asynchronous save
copies the state to the host, which is recorded, and writes it at once; the copy stays until
somebody waits for the save, for a real one takes longer than the steps that are captured.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import ModuleType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.state import CaptureState
from memplan.types.errors import MemplanError

_PACKAGE = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.async_utils"


class Checkpoints:
    """Stand-ins for what the ranks say to each other, and for copies to the host."""

    def __init__(self, state: CaptureState) -> None:
        self.state = state

    def install(self, patches: Patches, watcher: ImportWatcher) -> None:
        """Install it until `patches.undo()`."""

        def plan(module: ModuleType) -> None:
            wrapper = module._DistWrapper
            patches.set(wrapper, "__init__", _coordinator(wrapper.__init__))
            for name, stand_in in self._exchanges(module).items():
                patches.set(wrapper, name, stand_in)

        def stage(module: ModuleType) -> None:
            stager = module.StateDictStager
            patches.set(stager, "_offload_tensor", self._offload(stager._offload_tensor))

        def upload(module: ModuleType) -> None:
            patches.set(module, "_ThreadBasedAsyncCheckpointExecutor", lambda: _Uploads(module))
            patches.set(module, "_ProcessBasedAsyncCheckpointExecutor", self._process(module))

        def pin(module: ModuleType) -> None:  # needs a driver; the memory counts as it is
            patches.set(module, "pin_memory", lambda data_ptr, size: None)
            patches.set(module, "unpin_memory", lambda data_ptr: None)

        watcher.add(_MEGATRON, partial(self._fork_writers, patches))
        watcher.add(f"{_PACKAGE}.utils", plan)
        watcher.add(f"{_PACKAGE}._state_dict_stager", stage)
        watcher.add(f"{_PACKAGE}.state_dict_saver", upload)
        watcher.add("torch.cuda._pin_memory_utils", pin)

    # What the ranks say to each other

    def _exchanges(self, module: ModuleType) -> dict[str, Callable[..., Any]]:
        def reduce_scatter(wrapper: Any, step: str, map_fun: Any, reduce_fun: Any) -> Any:
            self._assume(wrapper)
            return _alone(module, wrapper, step, lambda: reduce_fun([map_fun()])[0])

        def all_reduce(wrapper: Any, step: str, map_fun: Any, reduce_fun: Any) -> Any:
            return _alone(module, wrapper, step, lambda: reduce_fun([map_fun()]))

        def broadcast(wrapper: Any, step: str, map_fun: Any) -> Any:
            return _alone(module, wrapper, step, map_fun)

        return {
            "reduce_scatter": reduce_scatter,
            "all_reduce": all_reduce,
            "broadcast": broadcast,
        }

    def _assume(self, wrapper: Any) -> None:
        if wrapper.get_world_size() > 1:
            self.state.assume(
                "rank",
                "of a distributed checkpoint this rank plans, writes and reads its own part; what "
                "several ranks hold alike it writes itself",
                op="checkpoint",
            )

    # Copies to the host

    def _offload(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def offload(stager: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
            if not isinstance(x, FakeTensor):
                return original(stager, x, memo, non_blocking)
            storage = x.untyped_storage()
            whole = x.detach().as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
            copy = stager._cached_storage_mapping.get(storage)
            if copy is None:
                # In memory of its own, page-locked as it is: not of PyTorch's pinned allocator.
                copy = whole.clone() if x.fake_device.type == "cpu" else whole.to("cpu")
                stager._cached_storage_mapping[storage] = copy
            else:
                copy.copy_(whole.view(copy.dtype))
            memo[id(x)] = staged = copy.view(x.dtype).as_strided(
                x.size(), x.stride(), x.storage_offset()
            )
            return staged

        return offload

    def _fork_writers(self, patches: Patches, module: ModuleType) -> None:
        """Megatron-LM's process that stays to write checkpoints gets the tensors by CUDA's IPC, and
        so cannot be: each checkpoint is written by a fork instead, its other way to do it."""
        persistent = getattr(module, "PersistentAsyncCaller", None)
        if persistent is None:
            return

        class Writer(module.TemporalAsyncCaller):  # type: ignore[misc, name-defined]
            @classmethod
            def _get_process(cls, *_args: Any, **_options: Any) -> None:
                assumptions.add(
                    "rank",
                    "the process that stays to write checkpoints is not counted: on the GPU it has "
                    "a context of its own",
                    op="async_save",
                    source=source(),
                )

        assumptions, source = self.state.assumptions, self.state.source
        patches.set(module, "PersistentAsyncCaller", Writer)

    def _process(self, module: ModuleType) -> Callable[[], _Uploads]:
        def executor() -> _Uploads:
            self.state.assume(
                "rank",
                "a checkpoint is written by a process of its own, whose memory is that of the "
                "copy it shares; its interpreter is not counted",
                op="async_save",
            )
            return _Uploads(module)

        return executor


class _Upload(Future[Any]):
    """A save that is done; the copy that it wrote lives until somebody asks whether it is."""

    def __init__(self, staged: Any) -> None:
        super().__init__()
        self.staged = staged

    def result(self, timeout: float | None = None) -> Any:
        self.staged = None
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.staged = None
        return super().exception(timeout)

    def done(self) -> bool:
        self.staged = None
        return super().done()


class _Uploads:
    """Stands in for the executors: saves at once."""

    def __init__(self, saver: ModuleType) -> None:
        self._saver = saver

    def execute_save(self, staged: Any, **options: Any) -> Future[Any]:
        state = staged.result() if isinstance(staged, Future) else staged
        upload = _Upload(state)
        try:
            upload.set_result(self._saver.save(state, **options))
        except MemplanError:
            raise
        except Exception as error:  # as it would come from the thread
            upload.set_exception(error)
        return upload


def _coordinator(original: Callable[..., None]) -> Callable[..., None]:
    def begin(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, *args, **kwargs)
        wrapper.is_coordinator = True

    return begin


def _alone(module: ModuleType, wrapper: Any, step: str, work: Callable[[], Any]) -> Any:
    """Do what the ranks would do together; an error is wrapped as theirs would be."""
    try:
        return work()
    except (MemplanError, EnoughSeen):
        raise
    except BaseException as error:
        failures = {wrapper.rank: module._wrap_exception(error)}
        raise module.CheckpointException(step, failures) from error
