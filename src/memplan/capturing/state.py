"""What a capture knows of its job: the device, the tensors on it and what is known of them.

Rules and handlers of operators get it; `mode` routes operators to them.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.capturing.fake.fast_fake import DeviceFakeMode
from memplan.capturing.host.memory import HostMemory
from memplan.capturing.known_values.answers import Answers, Assumptions
from memplan.capturing.known_values.assumed_sizes import AssumedSizes
from memplan.capturing.known_values.rounds import Rounds
from memplan.capturing.known_values.store import Values, worth_keeping
from memplan.capturing.recording.context import Context, shown_path, source_of
from memplan.capturing.recording.recorder import Recorder
from memplan.capturing.recording.work import Work
from memplan.types.engines import Engine, Stage
from memplan.types.errors import CaptureError
from memplan.types.installed import is_installed
from memplan.types.op_names import op_name
from memplan.types.trace import Provenance, Role

aten = torch.ops.aten

Handler = Callable[["CaptureState", Any, tuple[Any, ...], dict[str, Any]], Any]
Observer = Callable[["CaptureState", Any, tuple[Any, ...], dict[str, Any], Any], None]
OnOp = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], None]
Recording = Callable[["CaptureState", Any, tuple[Any, ...], Any], list[int]]


@dataclass(eq=False)
class CaptureState:
    """One capture's device, recorder, host memory, values, assumptions and rules of operators."""

    device_type: str = "cuda"
    routing: str = "balanced"
    """How data-dependent choices are assumed: `balanced` or `worst`."""
    handlers: dict[Any, Handler | None] = field(default_factory=dict)
    """Answer an operator in place of the fake kernel, or return NotImplemented. None: looked for
    among the rules, and there is none."""
    observers: dict[Any, Observer] = field(default_factory=dict)
    """See an operator's result and may add what its kernel takes for itself."""
    recordings: dict[Any, Recording] = field(default_factory=dict)
    """Record an operator's outputs, where their order against the kernel's own memory matters."""
    rules: dict[str, Handler] = field(default_factory=dict)
    """Users' and packages' rules, by `namespace::operator`."""
    collectives: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = field(
        default_factory=dict
    )
    """Answer operators between processes, on real tensors too."""

    # The device
    devices: int = 1
    alone: bool = False
    """Nobody said how many GPUs the job has."""
    own_device: int = 0
    """The process's own among them: number 0 of the trace."""
    current_device: Callable[[], int] = lambda: 0
    """The device that `cuda` without an index means."""
    has_sparse: bool = False
    """Whether the job has made a sparse tensor."""
    everything: bool = False
    """Set while every tensor on the job's kind of device counts as the job's, real ones too."""

    # Who is running
    acting: str = ""
    """The rule that is running; what it does is recorded under its name."""
    acting_for: FrameType | None = None
    """The frame that called it."""
    caller: FrameType | None = None
    """The frame that called the collective being answered."""
    on_op: OnOp | None = None
    """Called for each operator that is recorded, with its row."""
    on_real_op: Callable[[], None] | None = None
    """Called for each operator that is about to run for real."""
    on_foreign_op: Callable[[], None] | None = None
    """Called for operators whose effect is not only in the trace: operators between processes,
    those that write to real tensors, and those whose result depends on a real tensor's values."""
    on_error: Callable[[Exception], None] | None = None
    """Called for an error that an operator raises."""

    # What is known
    fake_mode: DeviceFakeMode = field(default_factory=DeviceFakeMode)
    recorder: Recorder = field(default_factory=Recorder)
    values: Values = field(default_factory=Values)
    sizes: AssumedSizes = field(default_factory=AssumedSizes)
    assumptions: Assumptions = field(default_factory=Assumptions)
    kernels: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    work: Work = field(default_factory=Work)
    stages: list[Stage] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    """Inference engines that share the card."""
    copies_from_host: int = 0
    """Copies of the host's data to tensors that are inputs."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    mode: TorchDispatchMode = field(init=False)
    """A mode that is entered where operators are to be followed that otherwise would not be."""

    def __post_init__(self) -> None:
        self.host = HostMemory(self.recorder, enabled=self.device_type != "cpu")
        self.context = Context(self.recorder.builder)
        alike = Rounds(self.recorder).alike
        self.answers = Answers(self.assumptions, self.source, self.context.in_model, alike)
        self._op_names: dict[Any, str] = {}

    def observe(self, func: Any, observer: Observer) -> None:
        """Add an observer; those that an operator already has come first."""
        before = self.observers.get(func)

        def both(*call: Any) -> None:
            assert before is not None
            before(*call)
            observer(*call)

        self.observers[func] = observer if before is None else both

    def in_engine(self) -> bool:
        """Whether the collective being answered is one of C++'s own in the backward pass."""
        return self.caller is None and torch._C._current_graph_task_id() != -1

    def begin_op(self, func: Any, tensors: Iterable[Any]) -> None:
        """An operator that reads some tensors begins."""
        self.recorder.builder.begin_op(
            str(func), reads=self.numbers(tensors), stream=self.recorder.stream
        )

    def begin_host_op(self, name: str, frame: FrameType | None) -> None:
        """Something that is no operator of PyTorch's begins to move memory."""
        self.recorder.flush()
        self.context.locate(frame, self.recorder.stream)
        self.recorder.builder.begin_op(name, stream=self.recorder.stream)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context manager in which the job does something else than train."""
        builder = self.recorder.builder
        self.recorder.flush()
        begin = len(builder)
        try:
            yield
        finally:
            self.recorder.flush()
            if len(builder) > begin:
                self.stages.append(Stage(name, begin, len(builder)))

    # Tensors

    def record(self, tensor: FakeTensor) -> int:
        """Track a fake tensor on the device; -1 for one that lives on the host."""
        device = tensor.fake_device
        if device.type != self.device_type:
            if device.type == "cpu":
                self.host.track(tensor)
            return -1
        if (device.index or 0) >= self.devices:
            has = "one device" if self.devices == 1 else f"{self.devices} devices"
            raise self.cannot(
                f"device {device}",
                f"the job is estimated with {has}",
                "let the script use cuda:0 when estimating",
            )
        self.refuse_sparse(tensor)
        high = self.sizes.high_bytes(tensor) if self.sizes.any else None
        known = None if high is None else Provenance.ASSUMED
        return self.recorder.track(tensor, self.device_number(device), high=high, provenance=known)

    def device_number(self, device: torch.device) -> int:
        """A device's number in the trace, where the process's own is 0."""
        index = device.index or 0
        if index == self.own_device:
            return 0
        return index or self.own_device

    def refuse_sparse(self, tensor: torch.Tensor, func: Any = "this") -> None:
        """Raises CaptureError for a tensor that has no storage of its own."""
        if tensor.layout is not torch.strided:
            raise self.cannot(
                f"a tensor of layout {tensor.layout}",
                f"{func} has no rule for it",
                "use dense ones when estimating (sparse=False for embeddings)",
            )

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor; for a sparse tensor, that of its values."""
        if tensor.layout is torch.sparse_coo:
            tensor = self.fake_mode.dispatch(aten._values.default, (), (tensor,), {})
        return self.recorder.number_of(tensor.untyped_storage())

    def op_name(self, func: Any) -> str:
        """An operator's name as the trace has it."""
        name = self._op_names.get(func)
        if name is None:
            name = self._op_names[func] = op_name(func)
        return name

    def numbers(self, tensors: Iterable[Any]) -> list[int]:
        """Numbers of the tracked storages among those of some tensors."""
        return self.numbers_of([tensor for tensor in tensors if isinstance(tensor, FakeTensor)])

    def numbers_of(self, tensors: list[FakeTensor]) -> list[int]:
        live = self.recorder.live
        found = (live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return [storage.number for storage in found if storage is not None]

    def blank(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        stride: Sequence[int] | None = None,
    ) -> FakeTensor:
        """A fake tensor of unknown content, which is not recorded; contiguous without strides."""
        func, args = aten.empty_strided.default, [tuple(shape), tuple(stride or ())]
        if stride is None:
            func, args = aten.empty.memory_format, args[:1]
        made: FakeTensor = self.fake_mode.dispatch(
            func, (), tuple(args), {"dtype": dtype, "device": torch.device(device)}
        )
        return made

    def fakify(self, tensor: torch.Tensor, *, keep_values: bool = True) -> FakeTensor:
        """A fake tensor with a real one's geometry, and the host's values when they are few. On the
        host, but for a real tensor on the job's own kind of device."""
        device = torch.device("cpu")
        if tensor.device.type == self.device_type != "cpu":
            device = torch.device(self.device_type, 0)
        fake = self.blank(tensor.size(), tensor.dtype, device, tensor.stride())
        self.host.stand_in(fake)
        if keep_values and tensor.device.type == "cpu" and worth_keeping(tensor):
            self.values.learn(fake, tensor.detach(), borrowed=True)
        return fake

    def empty(self, like: torch.Tensor, device: torch.device) -> FakeTensor:
        """A recorded fake tensor on `device` with the geometry and values of a real one."""
        fake = self.blank(like.size(), like.dtype, device, like.stride())
        self.record(fake)
        self.values.learn(fake, like)
        return fake

    def without_real(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[FakeTensor]]:
        made: list[FakeTensor] = []

        def convert(item: Any) -> Any:
            if isinstance(item, FakeTensor) or not isinstance(item, torch.Tensor):
                if isinstance(item, (list, tuple)):
                    return type(item)([convert(inner) for inner in item])
                return item
            self.refuse_sparse(item)
            fake = self.fakify(item)
            made.append(fake)
            return fake

        new_args = tuple(convert(item) for item in args)
        return new_args, {name: convert(item) for name, item in kwargs.items()}, made

    def role_of(self, tensor: torch.Tensor, role: Role, name: str = "") -> None:
        """Say what a live tensor's storage is for, or the storages of what a wrapper holds (this
        rank's part of a distributed tensor, a quantised one's data and scales)."""
        if isinstance(tensor, FakeTensor):
            number = self.number_of(tensor)
            if number >= 0:
                self.recorder.builder.set_role(number, role, name)
                if role == Role.GRADIENT:
                    self.sizes.forget(tensor)
            else:
                self.host.role_of(tensor, role)
        elif hasattr(tensor, "__tensor_flatten__"):
            for attribute in tensor.__tensor_flatten__()[0]:
                self.role_of(getattr(tensor, attribute), role, name)

    def devices_counted(self, frame: FrameType) -> None:
        """Somebody asks for the number of GPUs, in `frame`; where the script itself does, and only
        one is assumed, the answer says so."""
        file = frame.f_code.co_filename
        if self.alone and shown_path(file) and not is_installed(file):
            self.assumptions.add(
                "devices",
                "the script asked for the number of GPUs and was told one: what it divides among "
                "them, or starts on each, is taken whole; --world-size N, or its launcher, for a "
                "job of N",
                source=f"{shown_path(file)}:{frame.f_lineno}",
            )

    def belongs_to_module(self, tensor: Any) -> None:
        """A module has it, as a parameter or a buffer: of the model that trains, of one that is
        frozen or of an average of weights; unless it is known for something else."""
        if isinstance(tensor, FakeTensor):
            number = self.number_of(tensor)
            if number >= 0 and self.recorder.builder.role_of(number) == Role.UNKNOWN:
                self.role_of(tensor, Role.PARAMETER)
        elif isinstance(tensor, torch.Tensor) and hasattr(tensor, "__tensor_flatten__"):
            for attribute in tensor.__tensor_flatten__()[0]:
                self.belongs_to_module(getattr(tensor, attribute))

    def came_from_host(self, tensor: FakeTensor) -> None:
        """Data of the host were copied to it: an input, unless it is known for something else.
        What an optimizer (outside its closure) or the backward pass fetches, by a plan's levers, is
        none."""
        updates = self.context.in_optimizer and not torch.is_grad_enabled()
        if updates or torch._C._current_graph_task_id() != -1:
            return
        number = self.number_of(tensor)
        role = self.recorder.builder.role_of(number) if number >= 0 else Role.UNKNOWN
        if role == Role.UNKNOWN:
            self.role_of(tensor, Role.INPUT)
        self.copies_from_host += role in (Role.UNKNOWN, Role.INPUT)

    # What is said

    def assume(self, kind: str, text: str, *, op: str = "") -> None:
        """Something was not known, and is decided at the line of the job that is running."""
        self.assumptions.add(kind, text, op=op, source=self.source())

    def cannot(self, what: Any, why: str, hint: str = "") -> CaptureError:
        """The error for an operator that cannot be answered."""
        return CaptureError(
            f"{self.source() or 'the script'}: {what} cannot be captured: {why}",
            hint
            or "say what the operator makes (memplan.register_rule or torch.library.register_fake, "
            "docs/packages.md); without it the estimate lacks what it takes",
        )

    def source(self) -> str:
        """`file:line` of the user's code that is running."""
        return source_of(sys._getframe(1)) or self.context.current_source()
