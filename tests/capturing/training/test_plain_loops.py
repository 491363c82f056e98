"""What follows a training loop that reads no data loader."""

from __future__ import annotations

import ast
import linecache
import signal
import time
import traceback
from pathlib import Path

import pytest

from memplan.capturing.training import ending
from memplan.capturing.training.plain_loops import with_turns
from memplan.types.trace import Phase, Role, Trace
from tests.capturing.training.scripts import HEAD, run

STEP = "forward(torch.randn(4, 512)).backward(); optimizer.step(); optimizer.zero_grad()"
TRAINS = f"""
def train(rows, steps, optimizer=optimizer):
    for step in range(steps):
        {STEP.replace("4", "rows")}
"""


def largest(trace: Trace, phase: Phase) -> int:
    return int(trace.events.bytes[trace.events.phase == phase].max())


@pytest.mark.parametrize(
    "loop",
    [
        "for step in range(10_000):\n    BODY",
        "while True:\n    BODY\n    step += 1\n    if step > 10_000: break",
        "while step < 10_000:\n    BODY\n    step += 1",
        "for epoch in range(100):\n    for step in range(1000):\n        BODY",
        "def rows():\n    for step in range(10_000):\n        yield step\n"
        "for row in rows():\n    BODY",
    ],
)
def test_an_evaluation_is_seen(tmp_path: Path, loop: str) -> None:
    body = f"step = 0\n{loop.replace('BODY', STEP)}\n"
    body += "with torch.no_grad():\n    forward(torch.randn(1024, 512))\n"
    trace = run(tmp_path, body)
    assert largest(trace, Phase.EVALUATION) == 4 * 1024 * 512
    assert trace.meta.optimizer_steps <= 6
    assert not any("what the script does after" in note for note in trace.meta.notes)


def test_a_larger_training_is_followed(tmp_path: Path) -> None:
    trace = run(tmp_path, TRAINS + "for rows in (8, 4, 8192):\n    train(rows, 1000)\n")
    assert largest(trace, Phase.FORWARD) == 4 * 8192 * 512
    assert trace.meta.optimizer_steps <= 3 + 1 + 3


def test_those_that_need_no_more_are_left(tmp_path: Path) -> None:
    body = (
        TRAINS + "n = 0\nfor rows in range(1000):\n    train(4, 1000)\n    n += 1\nassert n == 4\n"
    )
    assert run(tmp_path, body).meta.optimizer_steps == 3 + 3


def test_another_kind_of_optimizer_is_followed(tmp_path: Path) -> None:
    body = f"""{TRAINS}
train(4, 1000)
history = torch.optim.LBFGS(model.parameters(), max_iter=5, history_size=7)
def closure():
    history.zero_grad()
    loss = forward(torch.randn(4, 512))
    loss.backward()
    return loss
for step in range(50):
    history.step(closure)
"""
    trace = run(tmp_path, body)
    events = trace.events
    of_state = trace.storages.role[events.storage] == Role.OPTIMIZER_STATE
    pair = 4 * (512 * 512 + 512)
    assert (of_state & (events.bytes == pair)).sum() >= 2 * 7, "the whole history"


@pytest.mark.parametrize("epochs", [2, 100])
def test_an_optimizer_for_later_is_followed_where_it_steps(tmp_path: Path, epochs: int) -> None:
    body = f"""{TRAINS}
later = torch.optim.Adam(model.parameters())
for epoch in range({epochs}):
    train(4, 1000)
train(4, 1000, later)
"""
    trace = run(tmp_path, body)
    role = trace.storages.role[trace.events.storage]
    steps = set(trace.events.step[role == Role.OPTIMIZER_STATE].tolist())
    assert steps and trace.meta.optimizer_steps - min(steps) >= 3
    assert not [one for one in trace.meta.assumptions if one.kind == "trainings"]


def test_a_loop_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(
        "def fit(step):\n    for number in range(10_000):\n        step()\n"
    )
    body = f"""
import engine
def step():
    {STEP}
engine.fit(step)
with torch.no_grad():
    forward(torch.randn(1024, 512))
"""
    assert largest(run(tmp_path, body), Phase.EVALUATION) == 4 * 1024 * 512


def test_what_fails_after_a_loop_is_an_assumption(tmp_path: Path) -> None:
    body = f"losses = []\nfor step in range(100):\n    {STEP}\n    losses.append(0)\nlosses[50]\n"
    trace = run(tmp_path, body)
    (assumption,) = [one for one in trace.meta.assumptions if one.kind == "ending"]
    assert "IndexError" in assumption.text
    line = HEAD.count("\n") + 5
    assert assumption.source.endswith(f"train.py:{line}")


@pytest.mark.parametrize("line", ["time.sleep(60)", "while True: pass"])
def test_what_waits_after_a_loop_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(ending, "_SECONDS_AFTER", 0.2)
    body = f"import time\nfor step in range(100):\n    {STEP}\n{line}\n"
    began = time.monotonic()
    trace = run(tmp_path, body)
    assert time.monotonic() - began < 30
    assert any("what the script does after" in note for note in trace.meta.notes)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_turn_that_goes_on_and_on_is_stopped(tmp_path: Path) -> None:
    step = STEP.replace("; ", ", ")
    body = f"for epoch in range(2):\n    list(map(lambda _: ({step}), iter(int, 1)))\n"
    trace = run(tmp_path, body)
    assert 3 < trace.meta.optimizer_steps < 32


def test_other_loops_are_compiled_as_they_are() -> None:
    source = "for row in rows:\n    total += read(row)\nwhile total:\n    total = half(total)\n"
    assert ast.dump(with_turns(ast.parse(source))) == ast.dump(ast.parse(source))


def test_a_compiled_function_with_loops(tmp_path: Path) -> None:
    body = f"""
class Net(nn.Module):
    def step(self, x, _index):
        return model(x)
    def forward(self, x):
        for index, _ in enumerate([1, 2]):
            x = self.step(x, index)
        count = 0
        while count < 2:
            x, count = self.step(x, count), count + 1
        return x
net = torch.compile(Net(), fullgraph=True, backend="eager")
def forward(batch):
    return net(batch.cuda()).square().mean()
for step in range(100):
    {STEP}
"""
    assert run(tmp_path, body).meta.optimizer_steps == 3


def test_a_long_expression(tmp_path: Path) -> None:
    body = f"for step in range(100):\n    {STEP}\nx = {'+'.join('1' * 2000)}\n"
    assert run(tmp_path, body).meta.optimizer_steps == 3


def test_errors_have_their_lines() -> None:
    source = (
        "while here(\n    1):\n    model.step()\n    for one in (\n        1 / 0): model.step()\n"
    )
    name = "<loops of a test>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, object] = {"__memplan_turns__": lambda items: items, "here": bool}
    space |= {"model": type("Model", (), {"step": lambda: 0})}
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(with_turns(ast.parse(source)), name, "exec"), space)
    assert traceback.extract_tb(caught.tb)[-1].lineno == 5
