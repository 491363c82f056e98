"""A training job on the planned allocator: recorded, planned, served, and planned again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from memplan.capturing.patches.internals import require
from memplan.runtime.planned.account import Account, HitRate, Policy
from memplan.runtime.planned.background import Planning
from memplan.runtime.planned.library import Library
from memplan.runtime.planned.phases import JobHooks, PhaseCursor
from memplan.runtime.planned.recording import Recording
from memplan.runtime.planned.statistics import Peaks
from memplan.runtime.planned.stream_order import StreamOrder
from memplan.runtime.planned.worth import Step, Worth
from memplan.types.errors import MemplanError
from memplan.types.plan import AllocationPart, Plan
from memplan.types.run_outcome import PlanSwitch
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`devices`: those that the job may use; `plan` is for the first. `card_bytes`: what a
        device has, where that is known. `say` gets sentences for people. `clock`: seconds."""
        require("runtime/planned")
        self.library = library
        self.devices = devices
        self.peaks = Peaks(library)
        self.account = Account()
        self.hit_rate: HitRate | None = None
        self._meta = meta
        self._plan = plan
        self._record_all = record_all
        self.card_bytes = card_bytes
        self._policy = policy or Policy()
        self._tell = say
        self._hooks = JobHooks(self)
        self._cursor: PhaseCursor | None = None
        self._recording: Recording | None = None
        self._order: StreamOrder | None = None
        self._planning: Planning | None = None
        self._again = False
        """Whether what is being recorded is not the first to be planned."""
        self._to_plan = plan is None and not record_all
        """Whether what is being recorded is then planned."""
        self._repeated = False
        self._clock = clock
        self.worth = Worth(self._policy.planning_seconds)
        self._step_began = 0.0
        self._hooks_before = 0
        self._planning_began = 0.0
        self._process = os.getpid()

    def __enter__(self) -> Job:
        if self._plan is not None:
            self._load(self.devices[0], self._plan, in_round=False)
        self._record()
        self._hooks.__enter__()
        self._hooks.watch_all(modules=self._plan is None)
        self._step_began = self._clock()
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
        taken = self._clock() - self._step_began
        hooks = (self.account.hook_nanoseconds - self._hooks_before) / 1e9
        if not self.account.switches:
            shortest = self.account.step_seconds_before
            own = max(taken - hooks, 0.0)
            self.account.step_seconds_before = own if shortest is None else min(shortest, own)
        if self._recording is not None:
            self._recording.stepped()
            self._recording.mark(self._hooks.phase, "")
            if self._recorded_enough(self._recording):
                self._use_recording()
        elif self._planning is not None and self._planning.done:
            self._take_plans(self._planning)
        elif self.hit_rate is not None and self._planning is None:
            self._watch(self.hit_rate, taken)
        self._step_began = self._clock()
        self._hooks_before = self.account.hook_nanoseconds

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
        self._planning_began = self._clock()
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
        seconds = self._clock() - self._planning_began
        self.account.planning_seconds += seconds
        self.worth.planned(seconds, again=self._again)

    def _load_found(self, plan: Plan) -> None:
        part = plan.allocation
        assert part is not None
        if self._load(part.device, part, in_round=True):
            torch.cuda.empty_cache()  # behind the adaptor PyTorch's own allocator holds it
            self.peaks.begin_ours(part.device)

    def _load(self, device: int, part: AllocationPart, *, in_round: bool) -> bool:
        if self.card_bytes is not None and part.arena_bytes > self.card_bytes:
            self.say(
                f"the plan takes {part.arena_bytes >> 20} MiB and the card has "
                f"{self.card_bytes >> 20} MiB: the ordinary allocator serves the job. "
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
            PlanSwitch(
                step=self.account.steps,
                device=device,
                arena_bytes=part.arena_bytes,
                requests=part.requests,
            )
        )
        return True

    def _watch(self, hit_rate: HitRate, seconds: float) -> None:
        """Plan again when that has become worth what it costs."""
        window = hit_rate.window()
        if self.worth.pays(Step(seconds, window, self._unused())):
            rate = f"hit rate {window.rate:.0%} in step {self.account.steps}: the job has changed"
            cost = self.worth.cost_seconds
            self.say(f"{rate}, planning again: it has lost what that costs, {cost:.1f} s")
            self._to_plan = self._again = True
            self.worth.planned(cost, again=True)  # not once more where none comes of it
            self._record()
            self._hooks.watch_all(modules=True)

    def _unused(self) -> float:
        """Reserved beyond the peak of what is allocated, as a share of the card."""
        unused = [0]
        for device in {switch.device for switch in self.account.switches}:
            now = self.peaks.statistics(device)
            if now is not None:
                unused.append(now.reserved - self.peaks.ours(device)["allocated_peak"])
        return max(unused) / self.card_bytes if self.card_bytes else 0.0

    def say(self, text: str) -> None:
        """A sentence for people, which the outcome keeps."""
        self.account.notes.append(text)
        self._tell(text)
