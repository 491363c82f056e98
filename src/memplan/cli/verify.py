"""Run a script for some steps on this machine's GPU, and compare with what was foreseen.

TRACE is what memplan estimate -o wrote; a PLAN of memplan fit is captured anew first. The script
runs for real, so it writes what it writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memplan.capturing.options import ScriptTarget
from memplan.cli.command import EXIT_NO, EXIT_YES, positive
from memplan.cli.files import input_path, is_json, read_plan
from memplan.cli.job import add_packages_option, read_job
from memplan.cli.machine import machine_gpu, machine_profile
from memplan.cli.program import check_program, split_program
from memplan.cli.streams import write_json, write_lines
from memplan.types.device import MIB, DeviceProfile
from memplan.types.device_corrections import (
    MEASURED_HERE,
    context_of,
    save_context,
)
from memplan.types.errors import MemplanError, NoAnswerError, UsageError
from memplan.worker.failure import CaptureFailedError, complaint
from memplan.worker.signals import ended_by_signal
from memplan.worker.streams import progress_line

if TYPE_CHECKING:
    from memplan.types.estimate import Estimate
    from memplan.types.trace import Trace
    from memplan.types.verification import Verification

TAKES_PROGRAM = True
_USAGE = "memplan verify job.trace train.py"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.usage = "memplan verify [options] TRACE|PLAN SCRIPT [ARGS…]"
    add = parser.add_argument
    add("--steps", type=positive, default=3, metavar="N", help="optimizer steps to run (3)")
    add("--calibrate", action="store_true",
        help="keep what the process took outside PyTorch for later estimates")  # fmt: skip
    add_packages_option(parser)
    add("--json", action="store_true", help="the answer as JSON on stdout")
    parser.set_defaults(world_size=None, gpus_per_node=None, rank=None)
    parser.set_defaults(routing="balanced", allow_network=False, alloc_conf=None)
    parser.set_defaults(whole_run=False, scan=None)


def run(args: argparse.Namespace) -> int:
    return ended_by_signal(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.program is None:
        raise UsageError("no trace and no script given", _USAGE)
    path = input_path(args.program.name)
    _, program = split_program(argparse.ArgumentParser(), list(args.program.argv))
    program = check_program(program, _USAGE)
    profile = machine_profile()
    if machine_gpu() is None or profile is None:
        raise NoAnswerError(
            "no GPU on this machine, and verify runs the script for real",
            "the same command on the machine with the GPU",
        )
    with progress_line() as progress, tempfile.TemporaryDirectory(prefix="memplan-verify-") as work:
        progress("reading what was foreseen")
        asked = argparse.Namespace(**vars(args) | {"program": program, "steps": None})
        foreseen, estimate, plan = _foreseen(path, asked, profile)
        progress(f"running {program.name} for {args.steps} steps")
        measured, real = _measure(Path(work), program, args.steps, plan)
    from memplan.estimation.verify import verify

    answer = verify(real, foreseen, estimate, measured)
    if args.calibrate:
        answer = _calibrated(answer, measured)
    if args.json:
        write_json(answer)
    else:
        from memplan.report.verification import verification_lines

        write_lines(verification_lines(answer))
    return EXIT_YES if answer.holds else EXIT_NO


def _foreseen(
    path: Path, args: argparse.Namespace, profile: DeviceProfile
) -> tuple[Trace, Estimate, Path | None]:
    """The captured job, its estimate for this card, and the plan if the file is one."""
    if is_json(path):  # a plan
        from memplan.worker.captures import RankCapture

        plan = read_plan(str(path))
        job = read_job(args, _USAGE)
        try:
            found = RankCapture(job.question(args, profile))(job.launch.target, plan)
        except CaptureFailedError as error:
            sys.stderr.write(complaint(error.outcome.message, error.outcome.hint))
            raise NoAnswerError(f"the script could not be captured with {path}") from error
        return found.trace, found.estimate, path
    from memplan.estimation import estimate
    from memplan.types.trace_file import load_trace

    trace = load_trace(path)
    return trace, estimate(trace, profile), None


def _measure(
    work: Path, program: ScriptTarget, steps: int, plan: Path | None
) -> tuple[dict[str, Any], Trace]:
    """The real run, in a process of its own. Raises MemplanError with what the script said."""
    from memplan.capturing.importers.snapshot import read_snapshot

    out, snapshot = work / "measured.json", work / "snapshot.pickle"
    words = ["--steps", str(steps), *(["--plan", str(plan)] if plan else []), str(out)]
    words += [str(snapshot), *(["-m"] if program.kind == "module" else [])]
    command = [sys.executable, "-P", "-m", "memplan.runtime.measure", *words, program.name]
    done = subprocess.run([*command, *program.argv], stdout=sys.stderr, env=dict(os.environ))
    if not out.exists() or not snapshot.exists():
        raise NoAnswerError(
            f"the run left no measurement (exit code {done.returncode}; above)",
            "the script alone, to see whether it runs on this machine",
        )
    measured: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return measured, read_snapshot(snapshot)


def _calibrated(answer: Verification, measured: dict[str, Any]) -> Verification:
    if answer.outside_bytes is None or answer.outside_bytes <= 0:
        raise MemplanError("nothing to calibrate: NVML did not say what the process took")
    context = context_of(answer.outside_bytes // MIB)
    date = datetime.now(UTC).date().isoformat()
    said = f"{MEASURED_HERE} on {date} with torch {answer.torch_version}"
    path = save_context(answer.device_name, context, said)
    return msgspec.structs.replace(answer, calibrated=str(path))
