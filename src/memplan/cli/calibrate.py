"""What kernels reach on this machine's GPU, for the step times of later estimates.

Single kernels are timed alone, which takes about a minute. The figures go to memplan's file of the
user's own cards, where estimate, fit and sweep find them by the card's name, or to the file of -o,
which --calibration FILE names.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from memplan.cli.command import EXIT_YES
from memplan.cli.files import input_path, output_path
from memplan.cli.machine import machine_profile, profile_of
from memplan.cli.streams import write_answer
from memplan.timing.table import kernel_times
from memplan.types.device import DeviceProfile, corrected
from memplan.types.device_corrections import (
    MEASURED_HERE,
    SHARES,
    Correction,
    corrections_path,
    read_corrections,
    save_kernels,
)
from memplan.types.errors import FormatError, NoAnswerError, UsageError

TAKES_PROGRAM = False
_MADE_BY = "memplan calibrate -o FILE writes one"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="write here, not to memplan's own file")
    add("-f", "--force", action="store_true", help="write over an existing file")


def run(args: argparse.Namespace) -> int:
    path = output_path(args.output, force=args.force) if args.output else corrections_path()
    card = machine_profile()
    if card is None:
        raise NoAnswerError(
            "no NVIDIA GPU is visible here, and kernels can be timed on a GPU only",
            "run it on the machine that has the card, and carry the file of -o to this one",
        )
    import torch

    if not torch.cuda.is_available():
        raise NoAnswerError(
            f"{card.device_name} is there, but this build of PyTorch ({torch.__version__}) cannot "
            "use it",
            "a build for CUDA",
        )
    # The driver may list cards in another order than CUDA, whose first one is timed.
    timed = torch.cuda.get_device_properties(0)
    card = profile_of(timed.name, timed.total_memory, (timed.major, timed.minor))
    if card is None:
        raise NoAnswerError(
            f"memplan has no profile of {timed.name}, whose kernels would be timed",
            "another card: CUDA_VISIBLE_DEVICES",
        )
    from memplan.runtime.kernel_cases import card_seconds, on_the_card, timed_cases
    from memplan.timing.calibration import efficiencies

    cases = timed_cases(on_the_card, card_seconds)
    found = efficiencies(((one.trace, one.seconds) for one in cases if not one.error), card)
    when = datetime.now(UTC).date().isoformat()
    said = f"{MEASURED_HERE} on {when} with PyTorch {torch.__version__}"
    low, high = SHARES
    shares = {kind: (one.compute, one.memory) for kind, one in found.items()}
    kept = {kind: both for kind, both in shares.items() if low <= min(both) and max(both) <= high}
    save_kernels(
        path,
        card.device_name,
        kept,
        said,
        alone=bool(args.output),
    )
    lines = [f"{'class of kernels':<28}{'of peak rate':>14}{'of bandwidth':>14}"]
    lines += [f"{kind:<28}{rate:>14.1%}{width:>14.1%}" for kind, (rate, width) in kept.items()]
    lines += [
        f"{kind}: left out, the tables' figures hold: {rate:g} of the peak rate and {width:g} of "
        f"the bandwidth are not between {low:g} and {high:g}"
        for kind, (rate, width) in shares.items()
        if kind not in kept
    ]
    lines += [f"{one.name}: not timed: {one.error}" for one in cases if one.error]
    lines.append(f"wrote {path}: step times on {card.device_name} are by these from now on")
    write_answer("\n".join(lines) + "\n")
    return EXIT_YES


def add_calibration_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration", metavar="FILE", help="step times by this file of memplan calibrate"
    )


def calibrated_cards(file: str | None, cards: dict[str, DeviceProfile]) -> dict[str, DeviceProfile]:
    """The same of several cards, of which the file must have one."""
    if file is None:
        return cards
    every = _with_kernels(file)
    known = [name for name, card in cards.items() if card.device_name in every]
    if not known:
        calibrated(file, next(iter(cards.values())))
    return cards | {name: corrected(cards[name], every[cards[name].device_name]) for name in known}


def calibrated(file: str | None, card: DeviceProfile | None) -> DeviceProfile | None:
    """The card with the figures that a file has of it, or as it is without a file. Raises
    UsageError for a file that has none of this card, FormatError for a damaged one, and one with
    classes of kernels that this version does not know."""
    if file is None:
        return card
    every = _with_kernels(file)
    measured = every.get(card.device_name) if card is not None else None
    if card is None or measured is None:
        names = ", ".join(every) or "no card"
        what = card.device_name if card is not None else "a card that nobody named"
        raise UsageError(f"{file} is of {names}, not of {what}", f"--gpu, or {_MADE_BY}")
    return corrected(card, measured)


def _with_kernels(file: str) -> dict[str, Correction]:
    """The cards of a file whose kernels were timed."""
    every = read_corrections(input_path(file, made_by=_MADE_BY))
    known = kernel_times().kernels
    for name, one in every.items():
        unknown = [kind for kind in one.kernels if kind not in known]
        if unknown:
            raise FormatError(
                f"{file}: {name}: no such class of kernels: {', '.join(unknown)}",
                f"{_MADE_BY}; the classes are {', '.join(sorted(known))}",
            )
    return {name: one for name, one in every.items() if one.kernels}
