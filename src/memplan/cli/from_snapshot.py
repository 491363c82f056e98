"""`memplan estimate --from-snapshot FILE`: why a job on a GPU ran out of memory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from memplan.cli.command import EXIT_NO, EXIT_YES
from memplan.cli.files import input_path
from memplan.cli.streams import write_json, write_lines
from memplan.types.device import DeviceProfile
from memplan.types.errors import UsageError

if TYPE_CHECKING:
    from memplan.types.out_of_memory import OomExplanation

_NOT_WITH = (
    "steps", "alloc_conf", "packages", "world_size", "gpus_per_node", "rank", "maximize",
    "multiple_of", "plan", "output", "m",
)  # fmt: skip


def explain_snapshot(args: argparse.Namespace, profile: DeviceProfile | None) -> int:
    """Write the explanation; the exit code."""
    path = args.from_snapshot
    if args.program is not None:
        raise UsageError(
            f"--from-snapshot explains a job that has run: {args.program.name} is not needed",
            f"memplan estimate --from-snapshot {path}",
        )
    for name in _NOT_WITH:
        if getattr(args, name):
            option = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
            option = "--with" if name == "packages" else option
            raise UsageError(f"{option} with --from-snapshot: nothing is captured", "leave it out")
    from memplan.capturing.importers.out_of_memory import read_out_of_memory
    from memplan.estimation.out_of_memory import explain_out_of_memory

    made_by = "torch.cuda.memory._dump_snapshot(FILE) writes one (docs/out-of-memory.md)"
    oom, trace = read_out_of_memory(input_path(path, made_by=made_by))
    answer = explain_out_of_memory(oom, trace, profile)
    if args.json:
        write_json(answer)
    else:
        from memplan.report.out_of_memory import out_of_memory_lines

        write_lines(out_of_memory_lines(answer, _next_command(answer, args.gpu)))
    return EXIT_YES if answer.fits else EXIT_NO


def _next_command(answer: OomExplanation, gpu: str | None) -> str:
    """The script is not known by its command line; its file is the outermost frame's."""
    script = "train.py"
    if answer.stack:
        place, _, function = answer.stack[-1].rpartition(" ")
        if function == "<module>":
            script = place.rpartition(":")[0]
    if answer.fits:
        return f"PYTORCH_ALLOC_CONF=expandable_segments:True python {script} …"
    return f"memplan fit --gpu {gpu or 'NAME'} -o job.plan {script} …"
