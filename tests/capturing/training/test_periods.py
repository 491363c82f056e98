"""Conditions on a step in functions that the loop calls: they hold behind the last step seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.types.trace import Phase, Trace
from tests.capturing.training.scripts import indented, run

EVALUATES = """
def evaluate():
    with torch.no_grad():
        forward(torch.randn(1024, 512))
"""
BY_ARGUMENT = """
def maybe_evaluate(step):
    if step > 0 and step % 500 == 0:
        evaluate()
"""
BY_CALLBACKS = """
class Evaluate:
    every = 250
    def on_step_end(self, trainer, step):
        if (step + 1) % self.every != 0:
            return
        evaluate()

def maybe_evaluate(step):
    for one in [Evaluate()]:
        one.on_step_end(None, step)
"""
BY_ITS_OWN_COUNTER = """
class Log:
    calls = 0
    def due(self):
        return not self.calls % 100
    def __call__(self, step):
        self.calls += 1
        if self.due():
            evaluate()

maybe_evaluate = Log()
"""


def _evaluations(trace: Trace) -> list[int]:
    return [
        nbytes
        for nbytes in trace.events.bytes[trace.events.phase == Phase.EVALUATION].tolist()
        if nbytes == 1024 * 512 * 4
    ]


@pytest.mark.parametrize("asks", [BY_ARGUMENT, BY_CALLBACKS, BY_ITS_OWN_COUNTER])
@pytest.mark.parametrize("loop", ["for (batch,) in loader:", "while True:\n    batch = rows"])
def test_an_evaluation_that_a_called_function_decides_on(
    tmp_path: Path, asks: str, loop: str
) -> None:
    body = f"""
rows, step = torch.randn(4, 512), 0
{EVALUATES}
{asks}
{loop}
{indented("batch", 4)}
    step += 1
    maybe_evaluate(step)
"""
    trace = run(tmp_path, body)
    assert _evaluations(trace)
    assert not any("later steps may do other things" in note for note in trace.meta.notes)


def test_conditions_that_do_not_count_steps_are_as_they_are(tmp_path: Path) -> None:
    """Layers by turns, and an accumulation that is over in each step."""
    body = f"""
{EVALUATES}
wide = nn.Linear(512, 4096).cuda()
def layers(batch):
    for number in range(1, 4):
        batch = wide(batch)[:, :512] if number % 5 == 0 else model(batch)
    return batch
def accumulated(number):
    return number % 2 == 1
number = -1
for (batch,) in loader:
    number += 1
    layers(batch.cuda()).sum().backward()
    if not accumulated(number):
        continue
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    layers(batch.cuda())
    assert [one for one in (7, 8) if one % 7 == 0] == [7]
    assert "%d" % 3 == "3" and not accumulated(4) and 5 % 3 == 2
"""
    trace = run(tmp_path, body)
    assert 4 * 4096 * 4 not in trace.events.bytes
    assert trace.meta.optimizer_steps == 3
    assert not any("later steps may do other things" in note for note in trace.meta.notes)


def test_a_condition_before_the_step_is_said(tmp_path: Path) -> None:
    body = f"""
{EVALUATES}
def training_step(batch, number):
    if (number + 1) % 100 == 0:
        evaluate()
    return forward(batch)
for number, (batch,) in enumerate(loader):
    training_step(batch, number).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace = run(tmp_path, body)
    assert not _evaluations(trace)
    (said,) = [note for note in trace.meta.notes if "later steps may do other things" in note]
    assert ": (number + 1) % 100 == 0 (" in said and said.endswith("train.py:19)")


def test_a_condition_holds_for_once(tmp_path: Path) -> None:
    body = f"""
{EVALUATES}
def maybe_evaluate(step):
    if step % 500 == 499:
        print(torch.zeros(1 << 20, device="cuda").shape)
step = 0
for epoch in range(20):
    for (batch,) in loader:
{indented("batch", 8)}
        step += 1
        maybe_evaluate(step)
"""
    trace = run(tmp_path, body)
    assert (trace.events.bytes == 4 << 20).sum() == 2, "one that is made, and freed"
