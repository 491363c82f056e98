"""`memplan fit` of several ranks: which share a plan, and where the plans are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memplan.capturing.options import ScriptTarget
from memplan.cli import fit as command
from memplan.cli import main
from memplan.cli.estimate import plans_of_ranks
from memplan.cli.rank_files import plan_of_rank
from memplan.recompute.solve import Solver
from memplan.types.plan import Plan
from memplan.types.plan_file import load_plan
from memplan.worker import captures, ranks
from memplan.worker.captures import Captured
from memplan.worker.pool import Workers
from memplan.worker.rank_choice import Requests, alike
from memplan.worker.ranks import SeenRanks
from memplan.worker.request import Question
from tests.fit.chain_job import MIB, ChainProgram, Greedy
from tests.fit.test_command import FakeCapture
from tests.schemas import read_answer

pytestmark = pytest.mark.usefixtures("short_searches")

WORDS = ("torchrun", "--nproc-per-node", "4", "train.py")


class StageCapture(FakeCapture):
    """The first rank has heavier weights than the others."""

    heavy = 8 * MIB

    def __init__(self, question: Question, workers: Workers, *, goes_on: bool = False) -> None:
        super().__init__(question, workers, goes_on=goes_on)
        place = question.request.options.place
        assert place is not None and question.profile is not None
        self._job = stage(question, place.rank)

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        return self._job(program, plan)


def stage(question: Question, rank: int) -> ChainProgram:
    assert question.profile is not None
    return ChainProgram(question.profile, weight=StageCapture.heavy if rank == 0 else 4 * MIB)


class StageRanks:
    """`RankCaptures` of these."""

    def __init__(self, size: int, question: Callable[[int], Question], *, workers: Workers) -> None:
        self.seen, self._question = SeenRanks(size, question), question

    def __enter__(self) -> StageRanks:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def capture(self, progress: Callable[[str], None]) -> None:
        while wanted := self.seen.wanted():
            for rank in wanted:
                asked = self._question(rank)
                trace = stage(asked, rank)(asked.request.program).trace
                self.seen.add(rank, "", trace, Path())


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(captures, "RankCapture", StageCapture)
    monkeypatch.setattr(ranks, "RankCaptures", StageRanks)
    monkeypatch.setattr(command, "machine_profile", lambda: None)
    monkeypatch.setattr(StageCapture, "heavy", 8 * MIB)
    solver = Greedy()
    monkeypatch.setattr(Solver, "solve", solver.solve)
    monkeypatch.setattr(Solver, "least_peak", solver.least_peak)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    Path("train.py").write_text("")
    yield


def fit(*words: str) -> int:
    return main(["fit", *words, *WORDS])


def plan_for(monkeypatch: pytest.MonkeyPatch, rank: int) -> Plan:
    """As `memplan run --plan job.plan` reads it."""
    monkeypatch.setenv("RANK", str(rank))
    return load_plan(plan_of_rank("job.plan"))


def test_each_rank_has_a_plan_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "")
    assert fit("--json", "--gpu", "2600MiB", "-o", "job.plan") == 0
    answer = read_answer("fit", capsys.readouterr().out)
    assert answer["plan"] == "job.plan"
    first, rest = answer["ranks"]
    assert (first["rank"], first["ranks"], rest["ranks"]) == (0, [0], [1, 2, 3])
    assert first["fits"] and first["added_fraction"] == answer["added_fraction"] > 0
    assert rest["fits"] and rest["added_fraction"] < first["added_fraction"]
    assert any("the one whose plan adds most seconds" in note for note in answer["notes"])
    heavy, *light = (plan_for(monkeypatch, rank) for rank in range(4))
    assert heavy.recompute is not None
    assert light[0] != heavy and light[1:] == [light[0]] * 2
    assert plans_of_ranks("job.plan", 4) == [heavy, *light]
    assert not Path("job.plan").exists()


def test_a_rank_that_does_not_fit_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    StageCapture.heavy = 64 * MIB
    assert fit("--gpu", "2600MiB", "-o", "job.plan") == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("does not fit 2600 MiB with any plan tried: a card of ")
    assert any("about rank 0, which does not fit" in line for line in lines)
    assert [line.split()[:2] for line in lines if line.startswith("  rank ")] == [["rank", "0"]]
    assert list(Path().glob("*.plan")) == []


def test_ranks_that_are_alike_share_one_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    StageCapture.heavy = 4 * MIB
    Path("job.rank2.plan").write_text("of an earlier job")
    assert fit("--gpu", "2200MiB", "-o", "job.plan") == 2
    assert "job.rank2.plan exists" in capsys.readouterr().err
    assert fit("-f", "--gpu", "2200MiB", "-o", "job.plan") == 0
    assert "  rank 0 and 3 like it" in capsys.readouterr().out
    assert [path.name for path in Path().glob("*.plan")] == ["job.plan"]
    assert plan_for(monkeypatch, 2).recompute is not None


@pytest.mark.parametrize("option", ["--frontier", "--price=h100=2/h"])
def test_what_is_about_one_rank(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--gpu", "h100", "--rank", "all", option) == 2
    assert "is about one rank" in capsys.readouterr().err


def test_without_a_rank_it_is_about_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--json", "--gpu", "h100", "--price=h100=2/h") == 0
    answer = read_answer("fit", capsys.readouterr().out)
    assert answer["ranks"] == []
    assert any("made from rank 0 of 4" in note for note in answer["notes"])


def test_ranks_between_those_that_were_captured() -> None:
    small, large, last = (Requests(n, b"", n) for n in (5, 7, 6))
    assert alike({0: small, 7: small}, 8) == {0: list(range(8))}
    assert alike({0: small, 1: large, 4: large, 7: last}, 8) == {
        0: [0],
        1: [1, 2, 3, 4, 5, 6],
        7: [7],
    }
