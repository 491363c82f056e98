"""Tracks the position in the job: module, phase, step, source line and stream."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import typing_extensions

from memplan.types.builder import TraceBuilder
from memplan.types.trace import Phase

_TORCH = str(Path(torch.__file__).parent)
_MEMPLAN = str(Path(__file__).parents[2])
_WITHIN = (_TORCH, _MEMPLAN, str(typing_extensions.__file__))
"""The last of them wraps functions of PyTorch that are deprecated."""
_HIDDEN = (_TORCH, _MEMPLAN, "<", str(Path(sys.modules["threading"].__file__ or "").parent) + "/")
_COMPILED = "_orig_mod"
"""The attribute in which `torch.compile` keeps the module; it is no level of the model's own."""
_MAX_REMEMBERED = 400_000


GENERATED = "<compiled graph>"
"""The file name of code that a compiler generated."""
ORIGINS = "_memplan_origins"
"""Among its globals: `BufferOrigin` by line."""


class BufferOrigin(NamedTuple):
    """What a line of generated code makes."""

    op: str
    module: str
    """Below the module that was compiled."""
    source: str
    phase: Phase | None = None
    """The phase where the code itself knows it; None for the phase of the operator that runs it."""


def generated_origin(frame: FrameType) -> BufferOrigin | None:
    """The origin of the line at which a frame of generated code is."""
    known: dict[int, BufferOrigin] = frame.f_globals.get(ORIGINS, {})
    return known.get(frame.f_lineno)


class Origin(NamedTuple):
    """The position of the forward operator to which a backward node belongs."""

    module: int
    source: int
    stream: int


class Context:
    """Follows module calls, optimizer steps and the autograd engine.

    Operators of the backward pass are ascribed to the module and line of the forward operator they
    differentiate, by the sequence number that autograd gives to both.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self.in_optimizer = 0
        self.backward_seen = False
        """Whether gradients were computed. An optimizer that steps before only makes its state, as
        some do to load a checkpoint into it."""
        self.held_stream: int | None = None
        """The stream of all operators, whichever their forward ran on; None: none is held."""
        self.outer_stream = 0
        """The current stream outside the backward pass; the engine leaves it for a node's own."""
        self.in_function = 0
        """Inside the forward of a `torch.autograd.Function` that is part of a graph: gradients are
        off there, and yet it is the job's forward."""
        self._forward_seen = False
        """A model runs or ran: no module that only transforms data."""
        self._stack: list[int] = []
        self._call = -1
        self._calls = 0
        self._names: dict[int, str] = {}
        self._origins: dict[int, Origin] = {}
        self._code_text: dict[CodeType, str] = {}
        self._below: dict[tuple[int, str], int] = {}
        self._generated: BufferOrigin | None = None
        """The origin of the generated line from which the last source was taken."""

    # Modules

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's `__call__` begins."""
        name = self._names.get(id(module))
        if name is None or not self._stack:
            name = self._name(module)
        if not self._stack and torch._C._current_graph_task_id() == -1:
            self._call = self._calls
            self._calls += 1
        self._stack.append(self.builder.intern(name))

    def leave_module(self) -> None:
        """The module's `__call__` ended, by whatever way."""
        self._stack.pop()
        if not self._stack:
            self._call = -1

    def _name(self, module: torch.nn.Module) -> str:
        prefix = class_name(module)
        if not self._stack:
            for path, child in module.named_modules():
                parts = [prefix, *(part for part in path.split(".") if part not in ("", _COMPILED))]
                self._names[id(child)] = ".".join(parts)
        return self._names.setdefault(id(module), prefix)

    @property
    def module_seen(self) -> bool:
        """Whether a module of the job was given or has asked for something of the device."""
        return self._forward_seen

    def model_called(self) -> None:
        """From here on, operators with gradients belong to a forward pass."""
        self._forward_seen = True

    @property
    def in_module(self) -> bool:
        return bool(self._stack)

    def in_model(self) -> bool:
        """Whether a module, an optimizer or the backward pass is running."""
        running = self.in_module or self.in_optimizer > 0
        return running or torch._C._current_graph_task_id() != -1

    # Operators

    def locate(self, frame: FrameType | None, stream: int) -> int:
        """Set the builder's module, phase and source line for the operator about to run.

        Returns the stream it runs on: a backward operator runs where its forward one did.
        """
        builder = self.builder
        if torch._C._current_graph_task_id() != -1:
            self.backward_seen = True
            builder.phase = Phase.BACKWARD
            builder.call = -2 if torch.is_grad_enabled() else -1
            node = torch._C._current_autograd_node()
            origin = self._origins.get(node._sequence_nr()) if node is not None else None
            if origin is not None and not self._recomputing(frame):
                builder.module, builder.source = origin.module, origin.source
                builder.source = self._source(frame, only_generated=True) or builder.source
                if stream != self.outer_stream:  # a hook made it current (FSDP's collectives)
                    return stream
                return origin.stream if self.held_stream is None else self.held_stream
            builder.module = self._stack[-1] if self._stack else builder.module
            builder.source = self._source(frame) or builder.source
            return stream
        builder.module = self._stack[-1] if self._stack else 0
        builder.source = self._source(frame)
        builder.call = self._call
        self._forward_seen = self._forward_seen or bool(self._stack)
        if self._generated is not None and self._generated.phase is not None:
            builder.phase = self._generated.phase
            self._forward_seen = True
            self.backward_seen |= builder.phase is Phase.BACKWARD
            return stream
        has_gradients = torch.is_grad_enabled() or self.in_function > 0
        if has_gradients:  # before the first call of a module too: a job may have none
            self._remember(stream)
        if self.in_optimizer and not (self._stack and torch.is_grad_enabled()):
            builder.phase = Phase.OPTIMIZER  # else: the model, run again by a closure
        elif not self._forward_seen:
            builder.phase = Phase.SETUP
        elif has_gradients:
            builder.phase = Phase.FORWARD
            if self._call >= 0 and not torch.is_grad_enabled():
                builder.call = -3 - self._call
        else:
            builder.phase = Phase.EVALUATION if self._stack else Phase.OTHER
        return stream

    def _recomputing(self, frame: FrameType | None) -> bool:
        return bool(self._stack) and frame is not None

    def _remember(self, stream: int) -> None:
        if len(self._origins) > _MAX_REMEMBERED:
            self._origins.clear()
        # The node was made just before its operator is dispatched, hence the last number given out.
        number = torch._C._autograd._get_sequence_nr() - 1
        self._origins[number] = Origin(self.builder.module, self.builder.source, stream)

    # Source lines

    def _source(self, frame: FrameType | None, *, only_generated: bool = False) -> int:
        """The number of `file:line`. Of generated code it is that of the model's line, and the
        builder's module becomes that module."""
        self._generated = None
        while frame is not None:
            code = frame.f_code
            text = self._code_text.get(code)
            if text is None:
                path = code.co_filename
                generated = path == GENERATED or ORIGINS in frame.f_globals
                text = self._code_text[code] = GENERATED if generated else shown_path(path)
            if text is GENERATED:
                if (made := generated_origin(frame)) is not None and made.source:
                    self._generated = made
                    self.builder.module = self._module_below(self.builder.module, made.module)
                    return self.builder.intern(made.source)
            elif text:
                return 0 if only_generated else self.builder.intern(f"{text}:{frame.f_lineno}")
            frame = frame.f_back
        return 0

    def _module_below(self, module: int, path: str) -> int:
        if not path:
            return module
        number = self._below.get((module, path))
        if number is None:
            compiled = next((text for text, n in self.builder.strings() if n == module), "")
            whole = f"{compiled}.{path}" if compiled else path
            number = self._below[module, path] = self.builder.intern(whole)
        return number

    def current_source(self) -> str:
        """`file:line` that the operator being run is ascribed to; in the backward pass there is no
        frame to ask."""
        number = self.builder.source
        return next((text for text, n in self.builder.strings() if n == number), "")


def class_name(module: torch.nn.Module) -> str:
    """The class of a root module, with which the paths of all its submodules begin."""
    return type(getattr(module, _COMPILED, module)).__name__


def shown_path(filename: str) -> str:
    if filename.startswith(_HIDDEN) and "site-packages" not in filename.removeprefix(_TORCH):
        return ""
    if filename.startswith(_WITHIN):
        return ""
    if cell := _notebook_cell(filename):
        return cell
    return _relative(filename, Path.cwd())


@functools.cache
def _relative(filename: str, here: Path) -> str:
    path = Path(filename)
    for folder in path.parents:
        if folder.name in ("site-packages", "dist-packages"):
            return str(path.relative_to(folder))
    try:
        return str(path.relative_to(here))
    except ValueError:
        return filename


def job_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` outward, that is not PyTorch's or ours."""
    while frame is not None and not shown_path(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def source_of(frame: FrameType | None) -> str:
    """`file:line` of `job_frame(frame)`, or the empty string."""
    frame = job_frame(frame)
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def syntax_of(filename: str) -> ast.Module:
    """What a source file says; nothing where it is not there or is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _notebook_cell(filename: str) -> str:
    """`In[3]` for the file that a notebook's kernel says a cell comes from; else empty."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(filename) if shell is not None else None
    return cell[1] if cell else ""
