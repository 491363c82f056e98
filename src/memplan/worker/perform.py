"""A capture in this process. What a script does to it stays, so a process captures once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memplan.types.alloc_conf import conf_in, merged
from memplan.types.plan import CompiledRegion
from memplan.worker.streams import progress_line, stdout_to_stderr

if TYPE_CHECKING:
    from memplan.types.trace import Trace
    from memplan.worker.request import CaptureRequest


def perform(request: CaptureRequest, only_writes: tuple[Path, ...] | None = None) -> Trace:
    """The trace of what is asked for. What the script prints goes to stderr.

    `only_writes`: as `capture_script` takes it. Raises MemplanError.
    """
    target, plan, environment = request.target, request.plan, request.options.environment
    extend_path(environment)
    said: list[tuple[str, str]] = []
    found: list[CompiledRegion | float] = []
    with stdout_to_stderr(), progress_line() as progress:
        progress("starting PyTorch")
        from memplan.capturing.script import capture_script

        in_effect = None
        if plan is not None:
            from memplan.runtime.in_effect import plan_in_effect

            in_effect = plan_in_effect(
                plan, target.command, lambda *note: said.append(note), found.append
            )
            target = target.with_arguments(plan)
        trace = capture_script(target, request.options, in_effect, only_writes=only_writes)
    inherited = conf_in(os.environ | environment)
    planned = plan.alloc_conf if plan else ""
    conf = next(filter(None, (trace.meta.alloc_conf, inherited, planned)), "")
    meta = msgspec.structs.replace(
        trace.meta,
        alloc_conf=merged(conf, request.alloc_conf),
        notes=[*trace.meta.notes, *dict.fromkeys(text for _, text in said)],
        unmet=dict(reversed(said)),
        regions=[one for one in found if isinstance(one, CompiledRegion)],
        clip_value=next((one for one in found if isinstance(one, float)), 0.0),
    )
    return replace(trace, meta=meta)


def extend_path(environment: Mapping[str, str]) -> None:
    """This process has started already: what PYTHONPATH would have done is done here."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    found = [str(Path(folder).absolute()) for folder in folders if folder]
    sys.path[:0] = [folder for folder in found if folder not in sys.path]
