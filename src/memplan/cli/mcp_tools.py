"""What agents can ask: each tool is a command of memplan with `--json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from rich.text import Text

from memplan.fit.answer import Fit
from memplan.fit.text import fit_lines
from memplan.report.difference import difference_lines
from memplan.report.out_of_memory import out_of_memory_lines
from memplan.report.terminal import estimate_lines
from memplan.types.difference import Difference
from memplan.types.errors import UsageError
from memplan.types.estimate import Estimate, MemoryCurve
from memplan.types.out_of_memory import OomExplanation

_WIDTH = 100
_NO_CURVE = MemoryCurve(events=[], steps=[], allocated_bytes=[], reserved_bytes=[])

Answer = Estimate | Fit | Difference | OomExplanation

Command = Annotated[
    list[str],
    msgspec.Meta(
        min_length=1,
        description="The job as it is started, without `python`: ['train.py', '--batch-size', "
        "'8'], ['-m', 'package.train'], ['torchrun', '--nproc-per-node', '8', 'train.py']",
    ),
]
Folder = Annotated[
    str, msgspec.Meta(description="Where the command is typed, and relative paths begin")
]
Card = Annotated[str, msgspec.Meta(description="The card: h100, rtx4090, or a size: 24GiB")]
Details = Annotated[
    bool,
    msgspec.Meta(description="Also memory over time, and all that is held at the peak: long"),
]
Percent = Annotated[str, msgspec.Meta(description="The most that a step may be slower: 5%")]
File = Annotated[
    str,
    msgspec.Meta(
        description="A trace, a PyTorch memory snapshot, an allocator event CSV, or what memplan "
        "estimate --json or fit --json wrote"
    ),
]


class Call(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a tool."""

    answers: ClassVar[type]
    schema: ClassVar[str]

    folder: Folder = "."

    def words(self) -> list[str]:
        """The words of memplan's command line. No argument can become another option of it."""
        raise NotImplementedError

    def shortened(self, answer: Any) -> Any:
        return answer


class EstimateCall(Call):
    """How much GPU memory a training script needs, whether it fits a card, and what fills it. The
    script runs unmodified on fake CUDA, without a GPU, for some steps."""

    answers = Estimate
    schema = "estimate"

    command: Command
    gpu: Card | None = None
    steps: Annotated[int, msgspec.Meta(ge=0, description="Optimizer steps to run")] | None = None
    details: Details = False

    def words(self) -> list[str]:
        return ["estimate", *_options(gpu=self.gpu, steps=self.steps), *_job(self.command)]

    def shortened(self, answer: Estimate) -> Estimate:
        return answer if self.details else _short(answer)


class FitCall(Call):
    """Makes a training script fit a card at the least added time: which values to recompute or to
    offload, each plan checked by a capture of its own. Takes several captures."""

    answers = Fit
    schema = "fit"

    command: Command
    gpu: Card
    at_most: Percent | None = None
    allow: Annotated[
        Literal["exact", "rounding", "numbers"],
        msgspec.Meta(description="What may change in the job's numbers: nothing; roundings; more"),
    ] = "exact"
    host_memory: (
        Annotated[str, msgspec.Meta(description="Of each host, for offloading: 64GiB")] | None
    ) = None
    details: Details = False

    def words(self) -> list[str]:
        options = _options(
            gpu=self.gpu, at_most=self.at_most, allow=self.allow, host_memory=self.host_memory
        )
        return ["fit", *options, *_job(self.command)]

    def shortened(self, answer: Fit) -> Fit:
        if self.details:
            return answer
        after = _short(answer.after) if answer.after is not None else None
        return msgspec.structs.replace(answer, before=_short(answer.before), after=after)


class WritingFitCall(FitCall):
    __doc__ = FitCall.__doc__

    plan: (
        Annotated[str, msgspec.Meta(description="Write the plan to this new file: job.plan")] | None
    ) = None

    def words(self) -> list[str]:
        name, *rest = super().words()
        return [name, *_options(output=self.plan), *rest]


class DiffCall(Call):
    """What makes the peak of one job higher than that of another, by category, module and source
    line."""

    answers = Difference
    schema = "diff"

    before: File
    after: File

    def words(self) -> list[str]:
        return ["diff", "--", self.before, self.after]


class ExplainCall(Call):
    """Why a job on a GPU ran out of memory, and what would have helped: from the snapshot that
    torch.cuda.memory._dump_snapshot wrote then."""

    answers = OomExplanation
    schema = "estimate-from-snapshot"

    snapshot: Annotated[str, msgspec.Meta(description="The snapshot's file")]
    gpu: Card | None = None

    def words(self) -> list[str]:
        return ["estimate", *_options(gpu=self.gpu, from_snapshot=self.snapshot)]


def tools(*, allow_write: bool) -> dict[str, type[Call]]:
    """Arguments of each tool by its name."""
    fit = WritingFitCall if allow_write else FitCall
    return {"estimate": EstimateCall, "fit": fit, "diff": DiffCall, "explain": ExplainCall}


def read_call(kind: type[Call], arguments: dict[str, Any]) -> Call:
    """The arguments, checked. Raises UsageError."""
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        hint = ""
        if kind is FitCall and "plan" in arguments:
            hint = "without a plan: this server writes no files (memplan mcp --allow-write does)"
        raise UsageError(f"{kind.schema}: {error}", hint) from error


def text_of(answer: Answer) -> str:
    """The report as a person sees it."""
    writers: dict[type, Callable[[Any], Iterable[Text]]] = {
        Estimate: lambda found: estimate_lines(found, _WIDTH),
        Fit: fit_lines,
        Difference: difference_lines,
        OomExplanation: out_of_memory_lines,
    }
    return "\n".join(line.plain for line in writers[type(answer)](answer))


def _short(answer: Estimate) -> Estimate:
    return msgspec.structs.replace(answer, curve=_NO_CURVE, held=[])


def _options(**values: object) -> Iterator[str]:
    """Each in one word: none can begin another option."""
    for name, value in values.items():
        if value is not None:
            yield f"--{name.replace('_', '-')}={value}"


def _job(command: list[str]) -> list[str]:
    """None of its words is an option of memplan's own."""
    return command if command[0] == "-m" else ["--", *command]
