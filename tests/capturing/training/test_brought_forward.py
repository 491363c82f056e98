"""What a loop does every so many turns comes in the one that runs."""

from __future__ import annotations

import sys

from memplan.capturing.training.brought_forward import bring_forward, later_conditions


def step(now: int, at: int) -> int:
    """Stands for an optimizer step: in turn `at`, what calls it is brought forward."""
    return bring_forward(sys._getframe(1)) if now == at else 0


def test_a_counter_of_enumerate() -> None:
    seen, turns = [], []
    for number, _ in enumerate("abcd"):
        turns.append(number)
        step(number, 2)
        if (number + 1) % 1000 == 0:
            seen.append(len(turns))
    assert seen == [3] and turns == [0, 1, 2, 3]


def test_a_counter_that_is_raised_before_the_condition() -> None:
    seen, done = [], 0
    for turn in range(5):
        step(turn, 3)
        done += 1
        if done % 500 == 0:
            seen.append(turn)
    assert seen == [3] and done == 501


def test_several_periods_at_once() -> None:
    seen = []
    for turn in range(4):
        step(turn, 1)
        if turn % 300 == 299:
            seen.append("saved")
        if turn > 0 and turn % 100 == 99:
            seen.append("evaluated")
    assert seen == ["saved", "evaluated"]


def train(turns: int) -> list[int]:
    seen: list[int] = []
    for turn in range(turns):
        step(0, 0)
        if turn % 2 == 1:
            seen.append(turn)
    return seen


def test_the_loop_around_the_function_that_trains() -> None:
    seen = []
    for epoch in range(1, 3):
        train(1)
        if epoch % 10 == 0:
            seen.append("an epoch of ten")
    assert seen == ["an epoch of ten", "an epoch of ten"]


class Trainer:
    def __init__(self) -> None:
        self.steps, self.every = 0, 1000
        self.seen: list[int] = []

    @property
    def fixed(self) -> int:
        return 5

    def train(self, turns: int) -> None:
        for turn in range(turns):
            step(turn, 1)
            self.steps += 1
            if self.steps % self.every == 0:
                self.seen.append(turn)
            if self.fixed % 7 == 0:
                self.seen.append(-1)


def test_a_counter_of_an_object() -> None:
    trainer = Trainer()
    trainer.train(3)
    assert trainer.seen == [1] and trainer.steps == 1001


def test_conditions_that_call_something_are_left_alone() -> None:
    seen = []
    for turn in range(3):
        step(turn, 1)
        if turn % 1000 == 0 and abs(turn) >= 0:
            seen.append(turn)
    assert seen == [0]


def test_conditions_that_later_steps_decide_otherwise() -> None:
    found: list[str] = []
    late, total = 300, 0
    for turn in range(2):
        size = 64 if turn < 200 else 128
        total += size * min(1 + turn // 100, 8)
        if turn == 1:
            found = later_conditions(sys._getframe())
        if turn > 0 and total >= 100:
            continue
        if turn - size >= late:
            found.clear()
        if late <= turn or turn == late or size > 900 or found > [str(turn)]:
            found.clear()
        if turn >= 100_000:
            break
    texts = [one.partition(" (")[0] for one in found]
    assert sorted(texts) == [
        *("late <= turn", "turn - size >= late", "turn // 100", "turn < 200", "turn == late"),
    ]
    assert all("test_brought_forward.py:" in one for one in found)
