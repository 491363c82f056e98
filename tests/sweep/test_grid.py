"""The grid, the options that it varies, samples, prices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memplan.capturing.options import ScriptTarget
from memplan.fit.option_choice import option_to_vary, unknown_option
from memplan.sweep.cards import read_cards, read_prices
from memplan.sweep.grid import (
    Dimension,
    combinations,
    read_dimension,
)
from memplan.sweep.samples import Samples
from memplan.types.errors import UsageError
from tests.placement.answers import GIB, answer_of


def _script(folder: Path, *argv: str, source: str = "") -> ScriptTarget:
    path = folder / "train.py"
    path.write_text(source)
    return ScriptTarget("script", str(path), argv)


def test_values_of_an_option() -> None:
    assert read_dimension("--tp=1, 2") == Dimension("--tp", ("1", "2"))
    for text in ("tp", "=1", "tp=", "tp=1,,2", "--=1"):
        with pytest.raises(UsageError, match="no option with values"):
            read_dimension(text)
    with pytest.raises(UsageError, match="names a value twice"):
        read_dimension("tp=1,2,1")


def test_every_combination_once() -> None:
    tp, batch = Dimension("tp", ("1", "2")), Dimension("batch", ("4", "8", "16"))
    found = combinations(["h100", "l4"], [tp, batch], 12)
    assert len(found) == len(set(found)) == 12
    assert found[0] == ("h100", ("1", "4")) and found[-1] == ("l4", ("2", "16"))
    assert combinations(["h100"], [], 1) == [("h100", ())]


def test_a_grid_that_is_too_large_is_refused_with_its_size() -> None:
    wide = [Dimension(name, tuple(map(str, range(100)))) for name in ("a", "b", "c")]
    with pytest.raises(UsageError, match="the grid has 1,000,000 combinations") as refused:
        combinations(["h100"], wide, 2000)
    assert "--most 1000000" in refused.value.hint


def test_an_option_that_is_varied_twice() -> None:
    twice = [Dimension("--batch-size", ("1",)), Dimension("batch_size", ("2",))]
    with pytest.raises(UsageError, match="given twice"):
        combinations(["h100"], twice, 10)


def test_an_option_is_found_as_it_is_given_declared_or_meant(tmp_path: Path) -> None:
    source = "p.add_argument('-b', '--batch-size', type=int)\np.add_argument('--lr', type=float)"

    def found(name: str, *argv: str) -> str | None:
        return option_to_vary(_script(tmp_path, *argv, source=source), name)

    assert found("batch_size", "-b", "4") == "-b"
    assert found("batch-size") == "--batch-size"
    assert found("lr") == "--lr"
    assert found("width", "model.width=8") == "model.width"
    assert found("bs", "--per_device_train_batch_size", "8") == "--per_device_train_batch_size"
    assert found("depth") is None
    with pytest.raises(UsageError, match=r"--vary size could be any of a.size, b.size"):
        found("size", "a.size=1", "b.size=2")


def test_an_unknown_option_is_named_with_near_ones(tmp_path: Path) -> None:
    program = _script(tmp_path, source="p.add_argument('--batch-size', type=int)")
    error = unknown_option(program, "--vary", "bath-size")
    assert "--vary bath-size: no such option" in error.message
    assert "--vary batch-size" in error.hint


def _told(program: ScriptTarget, ranks: int) -> int | None:
    found = Samples.of(program, ranks)
    return None if found is None else found.per_step(answer_of("h100", GIB))


@pytest.mark.parametrize(
    ("argv", "ranks", "samples"),
    [
        (("--batch-size", "4"), 1, 4),
        (("--batch-size", "4"), 8, 32),
        (("--batch-size", "4", "--tp", "2", "--pp-size", "2"), 8, 8),
        (("--batch-size", "4", "--gradient-accumulation-steps", "3"), 2, 24),
        (("--batch-size", "4", "--accum", "3"), 1, 12),
        (("--batch-size", "4", "--tp", "3"), 8, None),
        ((), 8, None),
    ],
)
def test_samples_of_a_step(
    tmp_path: Path, argv: tuple[str, ...], ranks: int, samples: int | None
) -> None:
    assert _told(_script(tmp_path, *argv), ranks) == samples


@pytest.mark.parametrize(
    ("argv", "samples"),
    [
        ((), 4),
        (("--beta", "2"), 4),
        (("--batch", "16"), 16),
        (("--batch-size", "auto"), None),
        (("-b", "-1"), None),
        (("-b8",), None),
        (("--batch-si=8",), None),
    ],
)
def test_a_default_that_is_not_in_force_counts_no_samples(
    tmp_path: Path, argv: tuple[str, ...], samples: int | None
) -> None:
    source = "p.add_argument('-b', '--batch-size', default=4)\np.add_argument('--beta')"
    assert _told(_script(tmp_path, *argv, source=source), 1) == samples


@pytest.mark.parametrize(
    ("seen", "samples"),
    [
        ({}, 48),
        ({"samples_per_step": 10.0, "batches_per_step": 3.0}, 40),
        ({"batches_per_step": 5.0}, 80),
    ],
)
def test_what_the_capture_saw_counts_before_the_options(
    tmp_path: Path, seen: dict[str, Any], samples: int
) -> None:
    """A batch may be larger than the data; batches may be accumulated by a constant."""
    program = _script(tmp_path, "--batch-size", "4", "--accum", "3")
    found = Samples.of(program, 4)
    assert found is not None and found.per_step(answer_of("h100", GIB, **seen)) == samples
    unknown = Samples.of(_script(tmp_path), 4)
    assert unknown is not None
    loaded = seen.get("samples_per_step")
    assert unknown.per_step(answer_of("h100", GIB, **seen)) == (loaded and 4 * loaded)


def test_cards_and_prices() -> None:
    cards = read_cards("h100, a100-80gb")
    assert list(cards) == ["h100", "a100-80gb"]
    assert read_prices(["H100=2.5/h,a100-80gb=1"], cards, 100) == {"h100": 2.5, "a100-80gb": 1}
    for texts, samples, said in (
        (["l4=1/h"], 1, "l4=1: no such --gpu"),
        (["h100=2"], 1, "no price for a100-80gb"),
        (["h100=2,a100-80gb=1", "H100=3"], 1, "H100 is given twice"),
        (["h100=2,a100-80gb=1"], None, "--price without --samples"),
        *((["h100=" + price], 1, "is no price of an hour") for price in ("free", "-1", "nan", "")),
        *(([text], 1, "names no card") for text in ("2.5/h", "=2.5/h", "h100=1,")),
    ):
        with pytest.raises(UsageError, match=said):
            read_prices(texts, cards, samples)
    with pytest.raises(UsageError, match="a card twice"):
        read_cards("h100,H100")
    with pytest.raises(UsageError, match="unknown GPU"):
        read_cards("h100,")
