from __future__ import annotations

import time

import pytest

from memplan.types.deadline import PATIENCE, SEARCH_PATIENCE, Deadline


class Clocks:
    """Stand in for this process's clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.wall)
        monkeypatch.setattr(time, "process_time", lambda: self.cpu)


def test_cpu_time_does_not_pass_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    wall, cpu = Deadline(10.0), Deadline(10.0, cpu_time=True)
    clocks.wall += 12.0
    assert wall.passed and wall.left() == 0.0
    assert cpu.left() == pytest.approx((PATIENCE * 10.0 - 12.0) / PATIENCE)
    clocks.cpu += 9.0
    assert cpu.left() == pytest.approx(1.0)
    clocks.cpu += 1.0
    assert cpu.passed


def test_a_machine_that_gives_no_cpu_time_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    cpu = Deadline(10.0, cpu_time=True)
    clocks.wall += PATIENCE * 10.0
    assert cpu.passed


def test_a_search_waits_longer_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does each of its parts: none ends early while the CPU time of all is not used up."""
    clocks = Clocks(monkeypatch)
    search = Deadline(10.0, cpu_time=True, patience=SEARCH_PATIENCE)
    clocks.wall += 16 * 9.0  # a sixteenth of a core
    clocks.cpu += 9.0
    assert not search.passed and search.left() > 0.2
    part = search.again(1.0)
    clocks.wall += 16 * 0.9
    clocks.cpu += 0.9
    assert not part.passed


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    whole = Deadline(12.0)
    clocks.wall += 4.0
    assert whole.part(2).left() == pytest.approx(4.0)
    assert whole.part(2, most_seconds=1.0).left() == pytest.approx(1.0)
    assert whole.spent() == pytest.approx(4.0)


def test_what_never_ends_gives_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works by it must not depend on how quick the machine is."""
    clocks = Clocks(monkeypatch)
    never = Deadline(cpu_time=True)
    before = never.left()
    clocks.wall = clocks.cpu = 1e12
    assert never.part(7, most_seconds=1.0) is never
    assert never.left() == before < float("inf")


def test_its_end_is_that_of_all_that_were_made_of_it() -> None:
    first = Deadline(60.0)
    later, part = first.again(600.0), first.part(2)
    assert not later.ended and not part.passed
    first.end()
    assert later.ended and part.left() == 0.0 and first.passed


def test_polling() -> None:
    looks = iter([False, False, True])
    assert Deadline(60.0).poll(lambda: next(looks), 0.0)
    assert not Deadline(0).poll(lambda: False, 0.0)
    assert Deadline(0).poll(lambda: True, 0.0)


def test_an_error_of_the_work_is_raised_and_ends_nothing_else() -> None:
    deadline = Deadline(60.0)
    with pytest.raises(ZeroDivisionError):
        deadline.result_of(lambda: 1 // 0)
    assert not deadline.ended
    assert deadline.result_of(lambda: 5) == 5
