"""What follows a training loop that reads no data loader."""

from __future__ import annotations

import ast
import enum
import linecache
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

from memplan.capturing.training import ending, plain_loops
from memplan.capturing.training.plain_loops import PlainLoops, with_turns
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
    unseen = " ".join(trace.meta.notes)
    assert "what the script does after" not in unseen and "an evaluation" not in unseen


def test_a_larger_training_is_followed(tmp_path: Path) -> None:
    trace = run(tmp_path, TRAINS + "for rows in (8, 4, 8192):\n    train(rows, 1000)\n")
    assert largest(trace, Phase.FORWARD) == 4 * 8192 * 512
    assert trace.meta.optimizer_steps <= 3 + 1 + 3


def test_a_training_on_a_loader_may_follow(tmp_path: Path) -> None:
    body = f"""{TRAINS}
train(2, 1000)
large = DataLoader(TensorDataset(torch.randn(4096, 512)), batch_size=2048)
for epoch in range(100):
    for (batch,) in large:
        forward(batch).backward(); optimizer.step(); optimizer.zero_grad()
with torch.no_grad():
    forward(torch.randn(8192, 512))
"""
    trace = run(tmp_path, body)
    assert largest(trace, Phase.EVALUATION) == 4 * 8192 * 512
    assert trace.meta.optimizer_steps <= 3 + 4


def test_a_grid_is_gone_through_as_long_as_it_grows(tmp_path: Path) -> None:
    body = f"""{TRAINS}
for rows in (4, 1024, 4, 8192):
    for rate in range(9):
        train(rows, 1000)
"""
    trace = run(tmp_path, body)
    assert largest(trace, Phase.FORWARD) == 4 * 8192 * 512
    assert trace.meta.optimizer_steps <= 4 * (3 + 3)


def test_turns_that_are_left_out_are_said(tmp_path: Path) -> None:
    notes = run(tmp_path, TRAINS + "for rows in 9 * [4] + [8192]:\n    train(rows, 9)\n").meta.notes
    assert any("further turns of the loops around the training" in note for note in notes)


def test_those_that_need_no_more_are_left(tmp_path: Path) -> None:
    body = (
        TRAINS + "n = 0\nfor rows in range(1000):\n    train(4, 1000)\n    n += 1\nassert n == 4\n"
    )
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps == 3 + 3
    assert not trace.meta.assumptions, "the script's own assertion holds"


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


def test_an_optimizer_that_never_steps_is_followed_once(tmp_path: Path) -> None:
    body = (
        "unused = torch.optim.Rprop(model.parameters())\n"
        f"{TRAINS}for turn in range(1000):\n    train(4, 1000)\n"
    )
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps <= 2 * 3 + 3
    assert "trainings" not in {one.kind for one in trace.meta.assumptions}


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
    assert "its training was cut short the script raised IndexError" in assumption.text
    line = HEAD.count("\n") + 5
    assert assumption.source.endswith(f"train.py:{line}")


def test_what_cannot_be_captured_after_a_loop_is_an_assumption(tmp_path: Path) -> None:
    body = f"""
for step in range(100):
    {STEP}
library = torch.library.Library("tests_of_loops", "DEF")
library.define("shapeless(Tensor x) -> Tensor")
library.impl("shapeless", lambda x: x.clone(), "CUDA")
torch.ops.tests_of_loops.shapeless(model.weight)
"""
    (assumption,) = [one for one in run(tmp_path, body).meta.assumptions if one.kind == "ending"]
    assert "could not be followed: " in assumption.text and "shapeless" in assumption.text


def test_functions_are_pickled_by_value(tmp_path: Path) -> None:
    other = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    body = f"""
import cloudpickle, subprocess, sys
def work():
    for turn in range(3):
        {{}}.update(a=turn)
done = subprocess.run([sys.executable, "-c", {other!r}], input=cloudpickle.dumps(work))
assert done.returncode == 0
for step in range(100):
    {STEP}
"""
    assert not run(tmp_path, body).meta.assumptions


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


def test_compiled_loops_are_one_graph(tmp_path: Path) -> None:
    body = f"""
def step(x):
    return x.sin()
@torch.compile(fullgraph=True)
def compiled(x):
    for _ in range(2):
        x = step(x)
    times = 0
    while times < 2:
        x, times = step(x), times + 1
        if times % 2 == 1:
            x = step(x)
    return x
for turn in range(1000):
    compiled(torch.randn(4, device="cuda"))
    {STEP}
"""
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps <= 6
    assert not trace.meta.assumptions


def test_deeply_nested_syntax_runs_as_it_is(tmp_path: Path) -> None:
    long = " + ".join(["'a'"] * 800)
    assert run(tmp_path, f"text = {long}\n{STEP}\n{STEP}\n{STEP}\n").meta.optimizer_steps == 3


def test_a_loop_around_the_capture_goes_on() -> None:
    around = plain_loops.turns(range(3))
    loops = PlainLoops()
    assert [loops.end() for _ in around or ()] == [False] * 3
    own = plain_loops.turns(range(3))
    assert loops.end()
    assert list(own or ()) == []


@pytest.mark.parametrize(
    "source",
    [
        "for row in rows:\n    total += read(row)\nwhile total:\n    total = half(total)\n",
        "@njit(cache=True)\ndef f(env):\n    for _ in range(9):\n        x = step(env)\n",
    ],
)
def test_other_loops_are_compiled_as_they_are(source: str) -> None:
    assert ast.dump(with_turns(ast.parse(source), "a.py")) == ast.dump(ast.parse(source))


def test_errors_have_their_lines() -> None:
    source = (
        "while here(\n    1):\n    model.step()\n    for one in (\n        1 / 0): model.step()\n"
    )
    name = "<loops of a test>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, object] = {"here": bool}
    space |= {"model": type("Model", (), {"step": lambda: 0})}
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(with_turns(ast.parse(source), name), name, "exec"), space)
    assert traceback.extract_tb(caught.tb)[-1].lineno == 5


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of an installed package with `learn`, another one in each test."""
    name = f"installed_for_{re.sub('[^a-z]', '_', request.node.name)}"
    source = "def learn(turns):\n    for turn in turns:\n        turn()\n"
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / f"{name}.py").write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return name


def test_a_training_inside_an_installed_package_is_left(tmp_path: Path, package: str) -> None:
    body = f"""
from {package} import learn
def turn(rows=4):
    {STEP.replace("4", "rows")}
for seed in range(100):
    learn([turn] * 10_000)
learn([lambda: turn(8192)] * 10_000)
with torch.no_grad():
    forward(torch.randn(1024, 512))
"""
    trace = run(tmp_path, body)
    assert largest(trace, Phase.FORWARD) == 4 * 8192 * 512
    assert largest(trace, Phase.EVALUATION) == 4 * 1024 * 512
    assert trace.meta.optimizer_steps <= 3 + 3 + 3
    assert not trace.meta.assumptions
    assert "an installed package's training" in " ".join(trace.meta.notes)


@pytest.mark.parametrize(
    "uses",
    [
        "history = learn([turn] * 10_000)\nprint(f'{history.losses[-1]:.3f}', 2 / history.best)",
        "history: object = learn([turn] * 10_000)",
        "best, model.steps = learn([turn] * 10_000)\nprint(best > 3, len(model.steps))",
        "def fitted():\n    return learn([turn] * 10_000)\nassert not list(fitted())",
    ],
    ids=["history", "annotated", "parts", "returned"],
)
def test_the_result_of_a_training_that_is_left_may_be_used(
    tmp_path: Path, package: str, uses: str
) -> None:
    body = f"""
from {package} import learn
def turn():
    {STEP}
{uses}
with torch.no_grad():
    forward(torch.randn(1024, 512))
"""
    trace = run(tmp_path, body)
    assert largest(trace, Phase.EVALUATION) == 4 * 1024 * 512
    assert not trace.meta.assumptions
    assert "an installed package's training" in " ".join(trace.meta.notes)


def test_a_model_that_such_a_training_returns_ends_the_job(tmp_path: Path, package: str) -> None:
    body = f"""
from {package} import learn
def turn():
    {STEP}
result = learn([turn] * 10_000)
result.model(torch.randn(1024, 512))
"""
    (assumption,) = run(tmp_path, body).meta.assumptions
    assert assumption.kind == "ending" and "'Unseen' object is not callable" in assumption.text


def test_results_of_calls_that_may_train_are_what_they_were() -> None:
    source = "class A(Enum):\n    fit = train(1)\n"
    source += "def f():\n    a = b, c = train(2)\n    return train(a)\n"
    space: dict[str, object] = {"Enum": enum.Enum, "train": lambda x: (x, x)}
    exec(compile(with_turns(ast.parse(source), "a.py"), "results", "exec"), space)
    assert [one.value for one in space["A"]] == [(1, 1)]  # type: ignore[attr-defined]
    assert space["f"]() == ((2, 2), (2, 2))  # type: ignore[operator]


def test_a_step_of_an_installed_package_is_no_training(tmp_path: Path, package: str) -> None:
    body = f"""
from {package} import learn
def step():
    {STEP}
ends = []
for turn in range(100):
    learn([step, lambda: ends.append(turn)])
assert len(ends) == turn + 1
"""
    trace = run(tmp_path, body)
    assert not trace.meta.assumptions and trace.meta.optimizer_steps <= 4
