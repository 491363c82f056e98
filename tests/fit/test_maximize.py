"""The largest value of an option: the search against made-up jobs, and once for real."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.fit.maximize import MOST_CAPTURES, Maximized, maximize
from memplan.fit.maximum_text import maximum_lines
from memplan.fit.option_choice import find_option
from memplan.fit.options import NumericOption
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.plan import Plan
from memplan.types.trace import EventKind, Phase, Trace, TraceMeta
from memplan.worker.captures import Captured
from memplan.worker.failure import CaptureFailedError
from tests import warm
from tests.fit.chain_job import capturing, not_captured
from tests.schemas import read_answer

MIB = 1 << 20
CARD = find_profile("4GiB")
PROGRAM = ScriptTarget("script", "train.py", ("--batch-size", "8"))


def trace_of(fixed: int, moving: int) -> Trace:
    """A step that holds `fixed` MiB and then `moving` MiB as well."""
    builder = TraceBuilder()
    held = builder.new_storage()
    builder.append(EventKind.ALLOC, held, fixed * MIB)
    for step in range(2):
        builder.phase, builder.step = Phase.FORWARD, step
        activation = builder.new_storage()
        builder.append(EventKind.ALLOC, activation, moving * MIB)
        builder.append(EventKind.FREE, activation, moving * MIB)
    return builder.build(TraceMeta(optimizer_steps=2))


class Script:
    """A job that needs `fixed` + `each` MiB per unit, up to `enough` units, and takes multiples of
    `multiple` up to `most`."""

    def __init__(
        self,
        fixed: int,
        each: int,
        *,
        enough: int = 1 << 40,
        most: int = 1 << 40,
        multiple: int = 1,
    ) -> None:
        self.fixed, self.each = fixed, each
        self.enough, self.most, self.multiple = enough, most, multiple
        self.asked: list[int] = []

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        value = int(program.argv[1])
        assert quiet == bool(self.asked), "the script's own words are shown once"
        assert value not in self.asked, "nothing is captured twice"
        self.asked.append(value)
        if value > self.most or value % self.multiple:
            raise not_captured("ValueError: no")
        trace = trace_of(self.fixed, max(self.each * min(value, self.enough), 1))
        return Captured(trace, estimate(trace, CARD))

    def largest(self) -> int:
        return largest(self.fixed, self.each)


@cache
def largest(fixed: int, each: int) -> int:
    """By asking for every value."""
    value = 0
    while estimate(trace_of(fixed, max(each * (value + 1), 1)), CARD).fits:
        value += 1
    return value


def searched(script: Script, start: int, multiple: int | None = None) -> Maximized:
    program = ScriptTarget("script", "train.py", ("--batch-size", str(start)))
    option = NumericOption("--batch-size", start)
    return maximize(program, option, script, lambda text: None, multiple)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3000), st.integers(45, 900), st.integers(1, 90))
def test_neighbours_are_proven(fixed: int, each: int, start: int) -> None:
    script = Script(fixed, each)
    answer = searched(script, start).answer
    assert answer.value == (script.largest() or None)
    assert answer.limited_by == "card"
    assert {(answer.value or 0) + 1, answer.value or 1} <= set(script.asked)
    assert answer.above is not None and answer.above.fits is False
    assert len(script.asked) <= 9


@pytest.mark.parametrize("start", [1, 8, 300, 5000])
def test_large_values_within_a_hundredth(start: int) -> None:
    script = Script(100, 1)
    answer = searched(script, start).answer
    best = script.largest()
    assert answer.value is not None and answer.above is not None
    assert answer.value <= best < answer.above.value <= answer.value * 1.01
    assert len(script.asked) <= 8


def test_none_fits() -> None:
    found = searched(Script(6000, 10), 8)
    answer = found.answer
    assert (answer.fits, answer.value, answer.limited_by) == (False, None, "card")
    assert answer.command == ["train.py", "--batch-size", "1"]
    assert answer.estimate.requested_peak_bytes == 6010 * MIB
    assert maximum_text(found).startswith("no value of --batch-size fits: with 1 peak ")


def test_the_script_takes_no_more() -> None:
    answer = searched(Script(100, 50, most=20), 5).answer
    assert (answer.value, answer.limited_by) == (20, "script")
    assert answer.above is not None and answer.above.value == 21 and answer.above.fits is None
    assert "with 21 the script fails: ValueError: no" in answer.reason


def test_multiples_are_found_out() -> None:
    script = Script(100, 50, multiple=8)
    answer = searched(script, 24).answer
    largest = script.largest()
    assert (answer.value, answer.multiple) == (largest - largest % 8, 8)
    assert "only multiples of 8 were tried" in answer.notes[0]
    assert sum(one.fits is None for one in answer.tried) == 1


def test_multiples_by_wish() -> None:
    script = Script(100, 7, multiple=5)
    answer = searched(script, 10, 5).answer
    largest = script.largest()
    assert answer.value is not None and largest - 10 < answer.value <= largest
    assert not answer.notes and all(value % 5 == 0 for value in script.asked)
    with pytest.raises(UsageError, match="is 8, no multiple of 3"):
        searched(script, 8, 3)


def test_data_that_do_not_suffice() -> None:
    answer = searched(Script(100, 50, enough=30), 8).answer
    assert answer.limited_by == "no_growth" and answer.value is not None
    assert answer.value >= 30 and "asks for the same memory" in answer.reason


def test_an_option_without_effect() -> None:
    with pytest.raises(NoAnswerError, match="no effect on the memory: with 8 and ") as caught:
        searched(Script(100, 0), 8)
    assert caught.value.exit_code == 4


def test_an_option_that_saves_memory() -> None:
    script = Script(4000, 10)
    script.each = -20
    script.fixed = 3000

    @capturing
    def capture(program: ScriptTarget, plan: Plan | None) -> Captured:
        trace = trace_of(100, 1600 // int(program.argv[1]))
        return Captured(trace, estimate(trace, CARD))

    with pytest.raises(NoAnswerError, match="needs less memory than 2"):
        maximize(PROGRAM, NumericOption("--batch-size", 2), capture, lambda text: None)


def test_the_present_value_fails() -> None:
    with pytest.raises(CaptureFailedError):
        searched(Script(100, 50, most=4), 8)


def test_the_number_of_captures_is_limited() -> None:
    """Each value needs a little more, and none ever fills the card."""

    class Endless(Script):
        def __call__(
            self,
            program: ScriptTarget,
            plan: Plan | None = None,
            *,
            quiet: bool = False,
            steps: int | None = None,
        ) -> Captured:
            self.asked.append(int(program.argv[1]))
            trace = trace_of(100, len(self.asked))
            return Captured(trace, estimate(trace, CARD))

    found = searched(Endless(1, 1), 8)
    assert len(found.answer.tried) == MOST_CAPTURES
    assert found.answer.limited_by == "captures" and found.answer.fits
    assert "not tried" not in maximum_text(found)


def maximum_text(found: Maximized) -> str:
    return "\n".join(line.plain for line in maximum_lines(found.answer, "next"))


def test_the_text() -> None:
    script = Script(100, 50)
    best = script.largest()
    lines = maximum_text(searched(script, 8)).splitlines()
    assert lines[0].startswith(f"largest --batch-size that fits: {best}, peak ")
    assert lines[0].endswith(" of 4.0 GiB")
    assert any(
        line.split()[:2] == ["--batch-size", str(best + 1)] and " not fit, up to " in line
        for line in lines
    )
    assert f"({len(script.asked)} captures" in lines[-3]
    assert lines[-1] == "next: next"


# Which option is meant


@pytest.mark.parametrize(
    ("source", "words", "name", "option", "value"),
    [
        ("", "--batch-size 8", "batch-size", "--batch-size", 8),
        ("", "--batch_size=8", "batch-size", "--batch_size", 8),
        ("", "--batch-size 8", "--batch_size", "--batch-size", 8),
        ("", "batch_size=4 lr=3", "batch-size", "batch_size", 4),
        ("", "+data.batch_size=4 lr=3", "batch_size", "+data.batch_size", 4),
        ("", "--data.batch_size 4", "batch_size", "--data.batch_size", 4),
        ("p.add_argument('-b', '--batch-size')", "-b 2", "batch-size", "-b", 2),
        ("", "-b 2", "b", "-b", 2),
        ("", "--batch-size 4 --batch-size=16", "batch-size", "--batch-size", 16),
        ("p.add_argument('--layers', '-l', default=6)", "", "layers", "--layers", 6),
        ("p.add_argument('--bsz', default=6)", "", "batch-size", "--bsz", 6),
        ("", "--per_device_train_batch_size 3", "batch-size", "--per_device_train_batch_size", 3),
    ],
)
def test_the_option(
    tmp_path: Path, source: str, words: str, name: str, option: str, value: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    program = ScriptTarget("script", str(path), tuple(words.split()))
    assert find_option(program, name) == NumericOption(option, value)


@pytest.mark.parametrize(
    ("words", "name", "message"),
    [
        ("", "batch-size", r"batch-size: no such option with a value"),
        ("--batch-size auto", "batch-size", r"--batch-size is 'auto', not a whole number above 0"),
        ("--batch-size 0", "batch-size", r"--batch-size is '0'"),
        ("--batch-size", "batch-size", r"batch-size: no such option with a value"),
        ("a.size=1 b.size=2", "size", r"could be any of a.size, b.size"),
        ("", "--", r"names no option"),
    ],
)
def test_no_option(tmp_path: Path, words: str, name: str, message: str) -> None:
    path = tmp_path / "train.py"
    path.write_text("p.add_argument('--layers', default=6)")
    program = ScriptTarget("script", str(path), tuple(words.split()))
    with pytest.raises(UsageError, match=message) as caught:
        find_option(program, name)
    assert caught.value.hint


def test_of_an_option_given_twice_the_last_is_set() -> None:
    """As argparse takes it."""
    program = ScriptTarget("script", "train.py", ("--bs=4", "--x", "1", "--bs", "8"))
    assert program.with_option("--bs", 9).argv == ("--bs=4", "--x", "1", "--bs", "9")


# For real

TRAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
size = parser.parse_args().batch_size
if size > 6:
    raise ValueError("six samples, no more")
net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.randn(size * 4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def memplan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.memplan(folder, "estimate", *words)


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = "--gpu 900MiB --maximize batch_size --json -o job.trace train.py --batch-size=5"
    done = memplan(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    answer = read_answer("estimate-maximize", done.stdout)
    tried = {one["value"]: one["fits"] for one in answer["tried"]}
    assert tried[5] is False and answer["limited_by"] == "card"
    assert tried[answer["value"]] is True and tried[answer["value"] + 1] is False
    assert answer["command"] == ["train.py", f"--batch-size={answer['value']}"]
    assert answer["estimate"]["fits"] and answer["estimate"]["command"] == answer["command"]
    assert (tmp_path / "job.trace").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--maximize batch-size train.py --batch-size 8", "no card to fill"),
        ("--multiple-of 8 train.py", "--multiple-of without --maximize"),
        ("--gpu l4 --maximize layers train.py", "layers: no such option with a value"),
        ("--maximize batch-size --multiple-of 0 train.py", "'0' is not a number from 1 on"),
        ("--maximize --batch-size train.py", "argument --maximize: expected one argument"),
    ],
)
def test_refused(tmp_path: Path, words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.py").write_text(TRAIN)
    done = memplan(tmp_path, *words.split())
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "try:" in done.stderr
