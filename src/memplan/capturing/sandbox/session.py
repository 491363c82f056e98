"""One sandbox from its installation to its removal."""

from __future__ import annotations

import contextlib
import os
import posix
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.capturing.job import other_processes
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.sandbox import (
    audit,
    environment,
    libraries,
    native_calls,
    network,
    patches,
)
from memplan.capturing.sandbox import journal as jr
from memplan.capturing.sandbox.changes import patch_mmap
from memplan.capturing.sandbox.children import Children, patch_children, patch_spawn
from memplan.capturing.sandbox.scratch import Budget, make_scratch, remove_scratch
from memplan.capturing.sandbox.view import View
from memplan.types.errors import InternalError

if TYPE_CHECKING:
    import torch

_MAX_REFUSED = 1000
_NOTF = "tensorboard.compat.notf"

_current: Sandbox | None = None


class Sandbox:
    """A context manager; everything in this process is in the sandbox while it is open.

    `is_fake(tensor)` says which tensors have no data to save, `new_tensor(nbytes, dtype, device)`
    makes the flat tensor that a loaded one is a view of. `on_note` is told each note as it is made,
    `on_program` each program that this process starts and that is no worker.
    """

    def __init__(
        self,
        allow_network: bool = False,
        on_note: Callable[[str], None] | None = None,
        is_fake: Callable[[torch.Tensor], bool] | None = None,
        new_tensor: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None = None,
        on_program: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self.notes: list[str] = []
        """What the sandbox kept the script from, and could not make good for it."""
        self.scratch = Path()
        """The directory that takes what is written; gone when the sandbox is closed."""
        self._allow_network = allow_network
        self._on_note = on_note
        self._on_program = on_program
        self._tensor_hooks = {"is_fake": is_fake, "new_tensor": new_tensor}
        self._view: View | None = None
        self._owner = True
        self._stack = contextlib.ExitStack()
        self._stand_ins: list[dict[int, Any]] = []

    @property
    def refused(self) -> list[str]:
        """Addresses that were refused, `host:port` or `host`, in this process and its workers."""
        return self._learned().refused if self._view is not None else []

    @property
    def device_uses(self) -> list[str]:
        """Where other processes of the sandbox used CUDA, as `report_device` was told."""
        return self._learned().device_uses if self._view is not None else []

    def _learned(self) -> View:
        assert self._view is not None
        if not self._view.closed:
            self._view.sync()
        return self._view

    def supply(self, find: Callable[[str], bool]) -> None:
        """Ask `find` for files that are to be read and are not there: whether they are by now."""
        assert self._view is not None
        self._view.supply = find

    def note(self, text: str) -> None:
        """Add to `notes` once, and tell whoever listens."""
        if text not in self.notes:
            self.notes.append(text)
            if self._on_note is not None:
                self._on_note(text)

    def __enter__(self) -> Sandbox:
        """Raises CaptureError where no scratch directory can be made."""
        if _current is not None:
            raise InternalError("a sandbox is already open in this process")
        self.scratch = Path(make_scratch())
        self._stack.callback(self._remove_scratch, posix.getpid())
        try:
            self._install(create=True)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _remove_scratch(self, owner: int) -> None:
        if posix.getpid() == owner:  # Not a forked worker on its way out.
            remove_scratch(str(self.scratch))

    def _install(self, create: bool) -> None:
        global _current
        with contextlib.ExitStack() as stack:
            view = self._view = View(str(self.scratch), create)
            self._owner = create
            stack.callback(view.close)
            stack.callback(environment.ProcessState().restore)
            # Undone before the environment: from here on, the last in is the first out.
            stack.callback(self._release)
            undo = Patches()
            stack.callback(undo.undo)
            environment.prepare(undo, view.temp, self._allow_network)
            with patches.in_one_pass(undo):
                self._watch_imports(undo, view, stack)
                children = Children(view, self._allow_network, self.note, self._on_program)
                stack.callback(children.close)
                patch_children(undo, children)
                patch_spawn(undo, view.root, self._allow_network)
                patch_mmap(undo, view)
                view.on_write = Budget(self.note)
                self._keep(patches.patch_files(undo, view))
            stack.callback(native_calls.take(view))
            self._arm(undo, view)
            stack.callback(audit.disarm)
            _current = self
            stack.callback(_forget)
            self._stack.push(stack.pop_all())

    def _watch_imports(self, undo: Patches, view: View, stack: contextlib.ExitStack) -> None:
        if _NOTF not in sys.modules:
            # TensorBoard then writes through Python, even where TensorFlow is installed.
            sys.modules[_NOTF] = types.ModuleType(_NOTF)
            stack.callback(sys.modules.pop, _NOTF, None)
        adapters = {
            "torch": lambda _: self._adapt_torch(undo, view),
            "safetensors.torch": lambda module: self._adapt_safetensors(undo, view, module),
        }
        watcher = ImportWatcher(adapters | libraries.adapters(undo, view))
        stack.callback(watcher.stop)
        watcher.start()

    def _adapt_torch(self, undo: Patches, view: View) -> None:
        from memplan.capturing.sandbox import saved, torch_files

        if not self._owner:
            other_processes.refuse_in_fresh(sys.modules["torch"], report_device)
        hooks = {name: hook for name, hook in self._tensor_hooks.items() if hook is not None}
        self._saved = saved.Saved(**hooks)  # type: ignore[arg-type]
        self._keep(torch_files.patch_torch(undo, view, self._saved))

    def _adapt_safetensors(self, undo: Patches, view: View, module: types.ModuleType) -> None:
        from memplan.capturing.sandbox import torch_files

        self._keep(torch_files.patch_safetensors(undo, view, self._saved, module))

    def _arm(self, undo: Patches, view: View) -> None:
        audit.arm(audit.file_checks(view, self.note))
        if not self._allow_network:
            network.patch_connect_ex(undo)
            audit.arm(network.network_checks(self._refuse))

    def _refuse(self, address: str) -> None:
        if self._view is not None and address not in self._view.refused[:_MAX_REFUSED]:
            self._view.record([(jr.REFUSED, address)])

    def _keep(self, stand_ins: dict[int, Any]) -> None:
        self._stand_ins.append(stand_ins)

    def _release(self) -> None:
        originals = {id(s): s.__wrapped__ for table in self._stand_ins for s in table.values()}
        patches.release_by_name(originals)


def join(root: str, allow_network: bool) -> None:
    """Enter, for good, the sandbox of the process that started this one; its files are shared."""
    if _current is None:
        member = Sandbox(allow_network)
        member.scratch = Path(root)
        member._install(create=False)


def overlay() -> str:
    """The directory that holds what was written so far, by the script's own paths; "" outside."""
    return _current._view.upper if _current is not None and _current._view is not None else ""


def report_device(text: str) -> None:
    """Tell the script's own process that this one used CUDA."""
    if _current is not None and _current._view is not None:
        _current._view.record([(jr.DEVICE, text)])


def _forget() -> None:
    global _current
    _current = None


def _after_fork() -> None:
    if _current is not None and _current._view is not None:
        _current._view.after_fork()


os.register_at_fork(after_in_child=_after_fork)
