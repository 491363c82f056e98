"""Files that hold an answer, or a job of which one can be had without its script."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memplan.cli.files import input_path, is_json
from memplan.fit.answer import Fit
from memplan.types.errors import FormatError
from memplan.types.estimate import Estimate

MADE_BY = "memplan estimate -o job.trace SCRIPT writes a trace, --json > job.json an answer"
_LARGEST = 512 << 20


def read_json_answer(path: Path) -> Estimate | Fit:
    """What `estimate --json` or `fit --json` wrote.

    Raises FormatError for JSON that is neither, for one of a later version, and for damage.
    """
    size = path.stat().st_size
    if size > _LARGEST:
        raise FormatError(f"{path} has {size} bytes; answers have at most {_LARGEST}", MADE_BY)
    raw = path.read_bytes()
    try:
        keys = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(keys.get("schema_version", b"0"))
        if version != 1 or not keys.keys() >= {"memplan_version", "notes"}:
            other = f" of version {version}" if version not in (0, 1) else ""
            raise FormatError(f"{path}: JSON{other}, but no answer of memplan's", MADE_BY)
        if "before" in keys and "levers" in keys:
            return msgspec.json.decode(raw, type=Fit)
        return msgspec.json.decode(raw, type=Estimate)
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}: not an answer of memplan's: {error}", MADE_BY) from None


def read_estimate(text: str) -> Estimate:
    """The estimate of a job: an answer as JSON (of `fit`, the job with its plan), or a trace, a
    snapshot or an event log, of which it is made anew without a card."""
    path = input_path(text, made_by=MADE_BY)
    if is_json(path):
        answer = read_json_answer(path)
        return answer if isinstance(answer, Estimate) else answer.after or answer.before
    from memplan.capturing.importers.load_any import load_any
    from memplan.estimation import estimate
    from memplan.simulate.replay import with_start

    return estimate(with_start(load_any(path)))
