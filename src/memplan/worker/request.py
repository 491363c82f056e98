"""What is asked of a process that captures, and what it answers; both travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.types.device import DeviceProfile
from memplan.types.errors import FormatError
from memplan.types.plan import Plan

if TYPE_CHECKING:
    from memplan.types.estimate import Estimate
    from memplan.types.trace import Trace


class CaptureRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="capture"
):
    """One capture, complete: equal requests have equal traces."""

    program: ScriptTarget
    """The program with the arguments that the user gave it."""
    launcher_arguments: tuple[str, ...] = ()
    """Arguments that the launcher puts before them, such as `--local_rank=0`."""
    options: CaptureOptions
    alloc_conf: str = ""
    """Allocator settings whose keys win over those of the script and the environment."""
    plan: Plan | None = None
    """The plan to put into effect."""

    @property
    def target(self) -> ScriptTarget:
        """The program as its launcher starts it."""
        return replace(self.program, argv=(*self.launcher_arguments, *self.program.argv))

    def encoded(self) -> bytes:
        """The request as JSON, with the same bytes for equal requests."""
        return msgspec.json.encode(self, order="deterministic")

    def key(self) -> str:
        """A name for it: equal for equal requests only."""
        return blake2b(self.encoded(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Question:
    """What is asked about a capture.

    Attributes:
        request: the capture.
        profile: the card that the verdict is about; None for no verdict.
        notes: sentences about how the job was described, for the answer.
    """

    request: CaptureRequest
    profile: DeviceProfile | None
    notes: tuple[str, ...] = ()

    def about(self, program: ScriptTarget, plan: Plan | None, steps: int | None = None) -> Question:
        """The same of another program, with `plan` in effect if there is one, and of so many
        steps."""
        changed: dict[str, Any] = {"plan": plan} if plan is not None else {}
        if steps is not None:
            changed["options"] = replace(self.request.options, steps=steps)
        request = msgspec.structs.replace(self.request, program=program, **changed)
        return Question(request, self.profile, self.notes)

    def answer(self, trace: Trace) -> Estimate:
        """The estimate of what was captured, on the allocator that a run with its plan has."""
        from memplan.estimation import estimate  # not before anything is refused
        from memplan.worker.planned_addresses import estimate_under

        plan = self.request.plan
        if plan is not None and plan.allocation is not None:
            result = estimate_under(trace, self.profile, plan.allocation)
        else:
            result = estimate(trace, self.profile)
        place = self.request.options.place
        return msgspec.structs.replace(
            result,
            notes=[*result.notes, *self.notes],
            rank=place.rank if place else None,
            world_size=place.world_size if place else None,
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a capture ended."""

    kind: Literal["captured", "not_captured", "out_of_memory", "error"] = "captured"
    """`out_of_memory`: of the machine that captures, not of the card."""
    exit_code: int = 0
    """The exit code for a command that ends with this result; 0 where there is a trace."""
    message: str = ""
    hint: str = ""

    @property
    def reason(self) -> str:
        """The message in one line, for a list of what was tried."""
        return self.message.removeprefix("error: ").partition("\n")[0].strip()


def read_request(encoded: bytes) -> CaptureRequest:
    """Raises FormatError for what is no request."""
    try:
        return msgspec.json.decode(encoded, type=CaptureRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a request for a capture: {error}") from error
