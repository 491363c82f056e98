"""A training job on the planned allocator: recorded, planned, served, and planned again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from memplan.capturing.patches.internals import require
from memplan.runtime.planned.account import Account, Policy, Switch
from memplan.runtime.planned.background import Planning
from memplan.runtime.planned.hit_rate import HitRate
from memplan.runtime.planned.library import Library
from memplan.runtime.planned.peaks import Peaks
from memplan.runtime.planned.phases import JobHooks, PhaseCursor
from memplan.runtime.planned.recording import Recording
from memplan.runtime.planned.stream_order import StreamOrder
from memplan.types.deadline import Deadline
from memplan.types.errors import MemplanError
from memplan.types.plan import AllocationPart, Plan
from memplan.types.trace import Phase, Trace, TraceMeta


class Job:
    """Follows one job on the allocator of a process; a context manager.

    With `plan` that plan is in effect from the beginning. Without one the first steps are
    recorded and planned in the background. `record_all`: nothing is planned, the whole run is
    recorded.
    """

    def __init__(
        self,
        library: Library,
        devices: list[int],
        meta: TraceMeta,
        *,
        plan: AllocationPart | None = None,
        record_all: bool = False,
        card_bytes: int | None = None,
        policy: Policy | None = None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """`devices`: those that the job may use; `plan` is for the first. `card_bytes`: what a
        device has, where that is known. `say` gets sentences for people."""
        require("runtime/planned")
        self.library = library
        self.devices = devices
        self.peaks = Peaks(library)
        self.account = Account()
        self.hit_rate: HitRate | None = None
        self._meta = meta
        self._plan = plan
        self._record_all = record_all
        self._card_bytes = card_bytes
        self._policy = policy or Policy()
        self._tell = say
        self._hooks = JobHooks(self)
        self._cursor: PhaseCursor | None = None
        self._recording: Recording | None = None
        self._order: StreamOrder | None = None
        self._planning: Planning | None = None
        self._to_plan = plan is None and not record_all
        """Whether what is being recorded is then planned."""
        self._repeated = False
        self._next_plan = Deadline(0)
        self._low = 0
        self._process = os.getpid()

    def __enter__(self) -> Job:
        if self._plan is not None:
            self._load(self.devices[0], self._plan, in_round=False)
        self._record()
        self._hooks.__enter__()
        self._hooks.watch_all(modules=self._plan is None)
        return self

    def __exit__(self, *_exc: object) -> None:
        if not self.of_this_process:
            return
        self._hooks.__exit__()
        try:
            if self._recording is not None:
                self._stop_recording()
        except Exception as error:  # what the job has done stands
            self._told_fault(error)
        self._end_planning()

    @property
    def of_this_process(self) -> bool:
        """False in a child that the job forked."""
        return os.getpid() == self._process

    def unload(self) -> None:
        """Plans that came into effect end; what they placed stays until it is released."""
        if self.of_this_process:
            for device in {switch.device for switch in self.account.switches}:
                self.library.unload(device)

    @property
    def recorded(self) -> Trace | None:
        """What was recorded first, or all."""
        return self.account.trace

    def wait_for_plan(self) -> None:
        """Until the planner at work, if any, is done; its plan comes into effect with the step."""
        if self._planning is not None:
            self._planning.wait()

    # What the hooks tell

    def entered(self, phase: Phase) -> None:
        start = time.perf_counter_ns()
        if self._recording is not None:
            self._recording.mark(phase, "")
        if self._cursor is not None:
            self._enter_phase(self._cursor.enter(phase))
        self.account.hook_nanoseconds += time.perf_counter_ns() - start

    def resumed(self, phase: Phase) -> None:
        if self._recording is not None:
            self._recording.mark(phase, "")
        if self._cursor is not None and self._cursor.number >= 0:
            self._enter_phase(self._cursor.enter(phase))

    def in_module(self, path: str) -> None:
        if self._recording is not None:
            start = time.perf_counter_ns()
            self._recording.mark(self._hooks.phase, path)
            self.account.hook_nanoseconds += time.perf_counter_ns() - start

    def stepped(self) -> None:
        self.account.steps += 1
        try:
            self._at_boundary()
        except Exception as error:  # the user's step goes on, whatever is wrong here
            self._told_fault(error)

    def _told_fault(self, error: Exception) -> None:
        """No more recording and planning; a plan in effect stays."""
        if self._order is not None:
            self._order.__exit__()
        for device in self.devices:
            self.library.stop_recording(device)
        self._end_planning()
        self._recording = self.hit_rate = None
        self.say(f"planning has ended by a fault of memplan: {type(error).__name__}: {error}")

    def _at_boundary(self) -> None:
        """Between two steps."""
        if self._recording is not None:
            self._recording.stepped()
            self._recording.mark(self._hooks.phase, "")
            if self._recorded_enough(self._recording):
                self._use_recording()
        elif self._planning is not None and self._planning.done:
            self._take_plans(self._planning)
        elif self.hit_rate is not None and self._planning is None:
            self._watch(self.hit_rate)

    def _enter_phase(self, number: int) -> None:
        for device in self.devices:
            self.library.enter_phase(device, number)
        if self.hit_rate is not None:
            if number < 0:
                self.hit_rate.leave()
            else:
                self.hit_rate.come_back()

    # Recording

    def _record(self) -> None:
        self._repeated = False
        self._recording = Recording(self.library, self.devices, self._policy.most_events)
        self._order = StreamOrder(self._recording)
        self._order.__enter__()

    def _recorded_enough(self, recording: Recording) -> bool:
        """One step after a step has repeated the one before: what it made is then released."""
        if self._record_all:
            return recording.full
        if recording.full or recording.steps >= self._policy.most_steps or self._repeated:
            return True
        self._repeated = recording.repeats()
        return False

    def _use_recording(self) -> None:
        complete = not self._recording_is_short()
        trace = self._stop_recording()
        self._hooks.watch_roots()
        if self._record_all:
            self.say(
                f"recorded the first {self.account.steps} steps; there is no room for more requests"
            )
        elif not complete:
            self.say("no plan: a step makes more requests than are recorded")
        elif self._to_plan:
            self._begin_planning(trace)

    def _recording_is_short(self) -> bool:
        return self._recording is not None and self._recording.full and self._recording.steps < 3

    def _stop_recording(self) -> Trace:
        assert self._recording is not None
        recording, self._recording = self._recording, None
        if self._order is not None:
            self._order.__exit__()
        recording.stop()
        trace = recording.trace(self._meta)
        if self.account.trace is None:
            self.account.trace = trace
        return trace

    # Planning

    def _begin_planning(self, trace: Trace) -> None:
        self._next_plan = Deadline(self._policy.seconds_between)
        try:
            self._planning = Planning(trace)
        except (MemplanError, OSError) as error:
            self.say(f"no plan, the ordinary allocator goes on: {error}")

    def _end_planning(self) -> None:
        if self._planning is not None:
            self._planning.close()
            self._planning = None

    def _take_plans(self, planning: Planning) -> None:
        self._planning = None
        try:
            plans = planning.plans()
        except MemplanError as error:
            self.say(f"no plan, the ordinary allocator goes on: {error.message}")
        else:
            for plan in plans:
                self._load_found(plan)
        finally:
            planning.close()

    def _load_found(self, plan: Plan) -> None:
        part = plan.allocation
        assert part is not None
        if self._load(part.device, part, in_round=True):
            torch.cuda.empty_cache()  # behind the adaptor PyTorch's own allocator holds it
            self.peaks.begin_ours(part.device)
        self._low = 0

    def _load(self, device: int, part: AllocationPart, *, in_round: bool) -> bool:
        if self._card_bytes is not None and part.arena_bytes > self._card_bytes:
            self.say(
                f"the plan takes {part.arena_bytes >> 20} MiB and the card has "
                f"{self._card_bytes >> 20} MiB: the ordinary allocator serves the job. "
                "`memplan fit` finds what would make it fit"
            )
            return False
        try:
            self.library.load(device, part, in_round=in_round)
        except MemplanError as error:
            self.say(f"{error.message}; the ordinary allocator serves the job")
            return False
        self._cursor = PhaseCursor(part.phases)
        planned = {device, *(switch.device for switch in self.account.switches)}
        self.hit_rate = HitRate(self.library, sorted(planned))
        self.account.switches.append(
            Switch(self.account.steps, device, part.arena_bytes, part.requests)
        )
        return True

    def _watch(self, hit_rate: HitRate) -> None:
        """Plan again when the plan no longer is that of the job."""
        window = hit_rate.window()
        self._low = self._low + 1 if window.rate < self._policy.least_rate else 0
        if self._low >= self._policy.low_steps and self._next_plan.passed:
            self._low = 0
            rate = f"hit rate {window.rate:.0%} in step {self.account.steps}: the job has changed"
            self.say(f"{rate}, planning again")
            self._to_plan = True
            self._record()
            self._hooks.watch_all(modules=True)

    def say(self, text: str) -> None:
        """A sentence for people, which the outcome keeps."""
        self.account.notes.append(text)
        self._tell(text)
