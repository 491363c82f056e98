"""`memplan estimate`: what it hands to the capture, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.cli import advice, main
from memplan.cli import estimate as command
from memplan.estimation import estimate
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace
from tests.estimation.jobs import training_job
from tests.schemas import read_answer


class Capture:
    """Stands for the real capture; remembers what it was asked."""

    def __init__(self) -> None:
        self.target: ScriptTarget | None = None
        self.options: CaptureOptions | None = None
        self.trace = training_job()
        self.error: CaptureError | None = None

    def __call__(
        self, target: ScriptTarget, options: CaptureOptions, within: object, *, only_writes: object
    ) -> Trace:
        self.target, self.options = target, options
        assert within is None and only_writes is None, "neither a plan nor a process of its own"
        print("the script prints")
        os.write(1, b"so do its children\n")
        if self.error:
            raise self.error
        return self.trace


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Capture]:
    fake = Capture()
    stand_in = types.ModuleType("memplan.capturing.script")
    stand_in.capture_script = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memplan.capturing.script", stand_in)
    monkeypatch.setattr(command, "machine_profile", lambda: None)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MEMPLAN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    yield fake


def test_the_answer_alone_is_on_stdout(capture: Capture, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--gpu", "rtx4090", "train.py", "--json", "-o", "x"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("peak 1.0 GiB (")
    assert "the script prints" not in out and "so do its children" not in out
    assert "the script prints" in err and "so do its children" in err
    assert capture.target == ScriptTarget("script", "train.py", ("--json", "-o", "x"))
    assert not Path("x").exists()


def test_json_is_the_whole_estimate(capture: Capture, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--json", "--gpu", "rtx4090", "train.py"]) == 0
    answer = read_answer("estimate", capfd.readouterr().out)
    expected = estimate(capture.trace, find_profile("rtx4090"))
    assert answer == json.loads(msgspec.json.encode(expected))


def test_options_reach_the_capture(capture: Capture) -> None:
    options = ["--gpu", "24GiB:sm90", "--steps", "5", "--routing", "worst", "--allow-network"]
    words = [*options, "-m", "train", "a", "--b"]
    assert main(["estimate", *words]) == 0
    assert capture.target == ScriptTarget("module", "train", ("a", "--b"))
    assert capture.options is not None
    assert capture.options.profile == find_profile("24GiB:sm90")
    assert capture.options.steps == 5
    assert capture.options.routing == "worst"
    assert capture.options.allow_network is True


def test_it_does_not_fit(capture: Capture, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--gpu", "600MiB", "train.py"]) == 3
    assert "does not fit" in capfd.readouterr().out.splitlines()[0]


def test_without_a_card(capture: Capture, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--json", "train.py"]) == 0
    answer = read_answer("estimate", capfd.readouterr().out)
    assert answer["fits"] is None and answer["gpu"] is None and answer["missing_bytes"] is None
    assert capture.options is not None and capture.options.profile.name == "a100-80gb"


def test_the_card_of_this_machine(
    capture: Capture, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "machine_profile", lambda: find_profile("l4"))
    assert main(["estimate", "--json", "train.py"]) == 0
    assert read_answer("estimate", capfd.readouterr().out)["gpu"]["name"] == "l4"


def test_the_trace_is_kept_and_never_written_over(
    capture: Capture, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", "--gpu", "l4", "-o", "job.trace", "train.py"]
    assert main(words) == 0
    next_line = capfd.readouterr().out.splitlines()[-1]
    assert next_line == "next: memplan export --format memory_viz -o job.pickle job.trace"
    assert len(load_trace(Path("job.trace"))) == len(capture.trace)
    before = Path("job.trace").read_bytes()
    capture.target = None
    assert main(words) == 2
    assert "exists" in capfd.readouterr().err
    assert capture.target is None, "refused before capturing"
    assert Path("job.trace").read_bytes() == before
    assert main(["estimate", "--gpu", "l4", "-f", "-o", "job.trace", "train.py"]) == 0


@pytest.mark.parametrize(
    ("option", "script", "environment", "conf"),
    [
        ("", "", "", ""),
        ("", "", "max_split_size_mb:64", "max_split_size_mb:64"),
        ("", "max_split_size_mb:32", "max_split_size_mb:64", "max_split_size_mb:32"),
        (
            "expandable_segments:True",
            "max_split_size_mb:32",
            "max_split_size_mb:64",
            "max_split_size_mb:32,expandable_segments:True",
        ),
        (
            "max_split_size_mb:128",
            "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:32,max_split_size_mb:48",
            "",
            "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:128",
        ),
        ("expandable_segments:False", "", "expandable_segments:True", "expandable_segments:False"),
    ],
)
def test_which_allocator_settings_win(
    capture: Capture,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    option: str,
    script: str,
    environment: str,
    conf: str,
) -> None:
    if environment:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", environment)
    meta = msgspec.structs.replace(capture.trace.meta, alloc_conf=script)
    object.__setattr__(capture.trace, "meta", meta)
    words = ["--alloc-conf", option] if option else []
    assert main(["estimate", "--json", *words, "train.py"]) == 0
    assert json.loads(capfd.readouterr().out)["alloc_conf"] == conf


@pytest.mark.parametrize(
    ("words", "code", "seconds", "said"),
    [
        ("", 0, 0.0, ""),
        ("--whole-run", 0, 60.0, ""),
        ("--whole-run --scan 2.5", 0, 2.5, ""),
        ("--scan 2.5", 2, None, "--whole-run --scan 2.5"),
        ("--whole-run --scan 0", 2, None, "not a number of seconds above 0"),
        ("--whole-run --steps 4", 2, None, "leave one of them out"),
    ],
)
def test_reading_the_loader_ahead(
    capture: Capture,
    capfd: pytest.CaptureFixture[str],
    words: str,
    code: int,
    seconds: float | None,
    said: str,
) -> None:
    assert main(["estimate", *words.split(), "train.py"]) == code
    assert said in capfd.readouterr().err
    assert (capture.options.scan_seconds if capture.options else None) == seconds


def test_bad_settings_are_refused_before_capturing(
    capture: Capture, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--alloc-conf", "nonsense:1", "train.py"]) == 2
    assert "nonsense" in capfd.readouterr().err
    assert capture.target is None


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({"PYTORCH_ALLOC_CONF": "nonsense:1"}, 2, "PYTORCH_ALLOC_CONF=nonsense:1 of the env"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x", "PYTORCH_ALLOC_CONF": ""}, 2, "PYTORCH_CUDA_ALLOC_CONF"),
        # PyTorch goes by the first that is set.
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "x"}, 0, ""),
    ],
)
def test_bad_settings_of_the_environment(
    capture: Capture,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variables: dict[str, str],
    code: int,
    said: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["estimate", "train.py"]) == code
    assert said in capfd.readouterr().err
    assert (capture.target is None) == (code == 2)
    # An option changes keys; PyTorch would refuse the variable as before.
    assert main(["estimate", "--alloc-conf", "max_split_size_mb:64", "train.py"]) == code


def test_what_cannot_be_captured_ends_with_4(
    capture: Capture, capfd: pytest.CaptureFixture[str]
) -> None:
    capture.error = CaptureError("train.py:3: aten::x has no answer", "give it a value")
    assert main(["estimate", "-o", "job.trace", "train.py"]) == 4
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.endswith(
        "memplan: error: train.py:3: aten::x has no answer\n  try: give it a value\n"
    )
    assert not Path("job.trace").exists()


@pytest.mark.parametrize(
    ("card", "own", "output", "line"),
    [
        (None, "", None, "memplan estimate --gpu a100-80gb train.py --lr '3 4'"),
        ("l4", "--gpu l4", None, "memplan estimate --gpu l4 -o job.trace train.py --lr '3 4'"),
        ("l4", "", "a.trace", "memplan export --format memory_viz -o a.pickle a.trace"),
        ("1GiB", "--gpu 1GiB", None, "memplan fit --gpu 1GiB -o job.plan train.py --lr '3 4'"),
        ("1GiB", "-o a --gpu=1GiB", "a", "memplan fit --gpu=1GiB -o job.plan train.py --lr '3 4'"),
        (
            "1GiB",
            "--gpu 1GiB --steps 5",
            None,
            "memplan estimate --steps 5 --gpu rtx4060 train.py --lr '3 4'",
        ),
    ],
)
def test_the_next_command(card: str | None, own: str, output: str | None, line: str) -> None:
    answer = estimate(training_job(), find_profile(card) if card else None)
    program = ["train.py", "--lr", "3 4"]
    assert advice.next_command(answer, own.split(), program, output) == line
