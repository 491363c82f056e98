"""What makes one peak higher than another: sums, places, and jobs that are not alike."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from memplan.capturing.importers.load_any import load_any
from memplan.estimation import estimate
from memplan.estimation.difference import difference
from memplan.report.difference import difference_headline, difference_lines, difference_markdown
from memplan.simulate.replay import with_start
from memplan.types.difference import ChangedPart, Difference
from memplan.types.estimate import Estimate
from memplan.types.trace import Phase, Role, Trace
from tests.estimation.jobs import MIB, Job, training_job

HOSTILE = "<img src=x onerror=alert(1)>|`_*"


def layers(
    count: int = 2,
    activation: int = 32,
    module: str = "Model.blocks.{}.mlp",
    source: str = "/home/a/job/train.py:{}",
) -> Trace:
    """Parameters of 10 MiB and an activation for each of some layers; then a backward pass."""
    job = Job()
    for layer in range(count):
        job.at(Phase.SETUP, "aten::empty", "", source.format(3))
        job.alloc(10 * MIB, Role.PARAMETER, name=f"blocks.{layer}.mlp.weight")
    job.at(Phase.FORWARD, "aten::to", "", source.format(8))
    job.alloc(2 * MIB, Role.INPUT)
    kept = []
    for layer in range(count):
        job.at(Phase.FORWARD, "aten::mm", module.format(layer), source.format(20 + layer % 2))
        kept.append(job.alloc(activation * MIB))
    job.at(Phase.BACKWARD, "aten::mm_backward", module.format(0), source.format(30))
    job.alloc(4 * MIB)
    for storage in kept:
        job.free(storage)
    return job.build()


def parts(rows: list[ChangedPart]) -> dict[str, int]:
    return {row.name: row.change_bytes // MIB for row in rows if row.change_bytes}


def compare(before: Trace, after: Trace) -> Difference:
    answer = difference(estimate(before), estimate(after), ("a", "b"))
    assert answer.change_bytes == answer.after.peak_bytes - answer.before.peak_bytes
    for rows in (answer.categories, answer.modules, answer.sources):
        assert sum(row.before_bytes for row in rows) == answer.before.peak_bytes
        assert sum(row.after_bytes for row in rows) == answer.after.peak_bytes
        assert sum(row.change_bytes for row in rows) == answer.change_bytes
        changes = [abs(row.change_bytes) for row in rows]
        assert changes == sorted(changes, reverse=True)
    return answer


def test_every_byte_of_a_known_change() -> None:
    answer = compare(layers(), layers(activation=48))
    assert parts(answer.categories) == {"activations": 32}
    assert parts(answer.modules) == {"Model.blocks.*.mlp": 32}
    assert parts(answer.sources) == {
        "/home/a/job/train.py:20": 16,
        "/home/a/job/train.py:21": 16,
    }
    assert answer.related is True
    assert answer.attributed == msgspec.convert(
        {"categories": 1.0, "modules": 1.0, "sources": 1.0}, type(answer.attributed)
    )
    assert answer.notes == []


def test_parameters_belong_to_their_modules() -> None:
    """More layers of one kind are one row, and the parameter's name finds its module's path."""
    answer = compare(layers(2), layers(5))
    assert parts(answer.categories) == {"activations": 96, "parameters": 30}
    assert parts(answer.modules) == {"Model.blocks.*.mlp": 126}


def test_the_other_way_round() -> None:
    answer = compare(layers(activation=48), layers())
    assert parts(answer.categories) == {"activations": -32}
    assert difference_headline(answer).startswith("peak -32 MiB (-")


def test_equal_peaks() -> None:
    answer = compare(layers(), layers())
    assert (answer.change_bytes, answer.related, answer.attributed.modules) == (0, True, 1.0)
    assert difference_headline(answer).startswith("peak unchanged: ")
    assert not any(row.change_bytes for row in answer.sources)


@pytest.mark.parametrize("moved", ["/tmp/other/job/train.py:{}", "job/train.py:{}"])
def test_a_job_in_another_folder(moved: str) -> None:
    answer = compare(layers(), layers(activation=48, source=moved))
    assert parts(answer.sources) == {"job/train.py:20": 16, "job/train.py:21": 16}
    assert answer.related is True


def test_unrelated_jobs() -> None:
    other = layers(module="ResNet.layer{}.conv", source="/home/b/images/main.py:{}")
    answer = compare(layers(), other)
    assert answer.related is False
    assert "unrelated" in answer.notes[0]
    # A line of the same number in a script of the same name is no likeness.
    same_name = layers(module="ResNet.layer{}.conv", source="/home/b/images/train.py:{}")
    assert compare(layers(), same_name).related is False


def test_a_log_that_knows_no_places(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(f"action,address,bytes,stream\nalloc,4096,{99 * MIB},0\n")
    answer = compare(layers(), with_start(load_any(log)))
    assert answer.related is None
    assert "cannot be told" in answer.notes[0]
    # 99 MiB more have no place: more than the whole change.
    assert parts(answer.modules)[""] == 99
    assert (answer.attributed.modules, answer.attributed.categories) == (0.0, 1.0)


def test_an_answer_that_says_no_places() -> None:
    old = replace(estimate(layers()), held=[])
    answer = difference(old, estimate(layers(activation=48)), ("old.json", "b"))
    assert sum(row.change_bytes for row in answer.modules) == answer.change_bytes
    assert any("old.json does not say" in note for note in answer.notes)


def test_the_change_through_json() -> None:
    """An answer read back compares as the trace it was made from."""
    before, after = estimate(layers()), estimate(layers(activation=48))
    read = msgspec.json.decode(msgspec.json.encode(after), type=Estimate)
    assert difference(before, read) == difference(before, after)


def test_what_is_held_sums_to_what_tensors_asked_for() -> None:
    answer = estimate(training_job())
    assert sum(part.bytes for part in answer.held) == answer.requested_peak_bytes
    many = estimate(layers(count=400, module="Model.unit{}x", activation=1))
    assert len(many.held) == 200
    assert (many.held[-1].role, many.held[-1].source) == ("", "")
    assert sum(part.bytes for part in many.held) == many.requested_peak_bytes
    assert sum(part.count for part in many.held) == 802


def test_hostile_names() -> None:
    answer = compare(layers(), layers(activation=48, module=f"M.{HOSTILE}\x1b[31m{{}}"))
    text = "\n".join(line.plain for line in difference_lines(answer))
    markdown = difference_markdown(answer)
    assert "\x1b" not in text + markdown
    assert "<img" not in markdown
    rows = [line for line in markdown.splitlines() if "onerror" in line]
    assert rows
    assert all(row.count("|") == 5 and row.count("`") == 0 for row in rows)
