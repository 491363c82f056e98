"""What a plan costs and saves in money."""

from __future__ import annotations

import json

import msgspec
import pytest

from memplan.cli import main
from memplan.fit.answer import Fit
from memplan.fit.choice import Limits
from memplan.fit.text import fit_lines
from memplan.fit.worth import Other, priced
from memplan.types.estimate import Estimate
from tests.fit.test_answer import chain, found
from tests.fit.test_command import SOURCE, FakeCapture
from tests.placement.answers import GIB, answer_of


@pytest.fixture(scope="module")
def answer() -> Fit:
    """A plan that was found in a minute, for a step of 2 s; 0.1 s more, and 0.4 s for the link."""
    planned = found(chain("2600MiB"), Limits()).answer
    assert planned.after is not None
    after = msgspec.structs.replace(planned.after, step_seconds=2.1)
    lever = msgspec.structs.replace(planned.levers[0], bound="link", added_seconds=0.4)
    return msgspec.structs.replace(planned, after=after, levers=[lever], seconds=60.0)


def alone(seconds: float | None, *, fits: bool = True) -> Estimate:
    return answer_of("a100-80gb", (10 if fits else 100) * GIB, step_seconds=seconds)


def test_other_cards_cost_what_their_steps_take(answer: Fit) -> None:
    others = [
        Other("dear", 7.2, alone(2.0)),
        Other("cheap", 0.36, alone(2.5)),
        Other("small", 0.1, alone(1.0, fits=False)),
        Other("unknown", 1.0, alone(None)),
        Other("refused", 1.0, None),
    ]
    rows = {row.gpu: row for row in priced(answer, "ours", 1.44, others)}
    ours = rows.pop("ours")
    assert ours.plan and ours.step_cost == pytest.approx(2.5 * 1.44 / 3600)
    # A minute at 1.44 an hour is 0.024; each step saves 0.004 - 0.001.
    assert rows["dear"].step_cost == pytest.approx(0.004)
    assert {name: row.paid_after_steps for name, row in rows.items()} == {
        "dear": 8,
        "cheap": None,
        "small": None,
        "unknown": None,
        "refused": None,
    }
    assert [row.step_cost for row in rows.values()][2:] == [None] * 3
    said = [
        line.plain
        for line in fit_lines(
            msgspec.structs.replace(answer, priced=priced(answer, "ours", 1.44, others))
        )
    ]
    assert "  ours          1.44/h with the plan: 1.000 for 1,000 steps" in said
    assert any(
        line.endswith("4.000 for 1,000 steps; the plan (60 s) has paid for itself by step 8")
        for line in said
    )
    assert any(line.endswith("without a plan: 0.250 for 1,000 steps, not dearer") for line in said)
    assert "  small         0.1/h without a plan: does not fit" in said
    few = msgspec.structs.replace(answer, priced=priced(answer, "ours", 0.00036, []))
    assert "  ours          0.00036/h with the plan: 0.00025 for 1,000 steps" in [
        line.plain for line in fit_lines(few)
    ]


def test_a_plan_that_adds_more_than_it_may_has_its_price(answer: Fit) -> None:
    beyond = msgspec.structs.replace(answer, fits=False, at_most=0.2)
    assert priced(beyond, "ours", 1.44, []) == priced(answer, "ours", 1.44, [])


def test_the_command(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path_factory.mktemp("job") / "train.py"
    script.write_text(SOURCE)
    monkeypatch.setattr("memplan.worker.captures.RankCapture", FakeCapture)
    words = ["fit", "--json", "--gpu", "2600MiB", "--price"]
    assert main([*words, "2600MiB=1.5/h", str(script)]) == 0
    [row] = json.loads(capfd.readouterr().out)["priced"]
    assert row["gpu"] == "2600MiB" and row["per_hour"] == 1.5 and row["plan"] and row["fits"]
    for price, said in (("h100=2/h", "no price for 2600MiB"), ("2600MiB=no", "is no price")):
        assert main([*words, price, str(script)]) == 2
        assert said in capfd.readouterr().err
