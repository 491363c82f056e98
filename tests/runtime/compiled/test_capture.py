"""A recorded step does what the plain one does, becomes a graph of what the dispatcher saw, or is
refused by the construct's name and the line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.runtime.compiled.capture import capture_step
from memplan.runtime.compiled.dependencies import operators
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.program import Kind, facts_of
from memplan.runtime.compiled.recording.operators import Operators
from tests.runtime.compiled.recorded import Job, job_of, residual_job, run

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
Body = Callable[[Any, Any, Tensor], Any]
REFUSED: dict[str, tuple[Body, str]] = {}
SCALE = {"of": torch.ones(())}


def refused(construct: str) -> Callable[[Body], Body]:
    def note(body: Body) -> Body:
        REFUSED[body.__name__] = body, construct
        return body

    return note


def backward(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def schedule_of(optimizer: Any) -> Any:
    """Made in the first step."""
    if not hasattr(optimizer, "schedule"):
        optimizer.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return optimizer.schedule


@refused("a branch on the value of a tensor")
def branch(model: Any, optimizer: Any, x: Tensor) -> Any:
    if backward(model, optimizer, x) > 1e9:  # here
        optimizer.zero_grad()
    optimizer.step()


@refused("used as a Python float")
def conversion(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    optimizer.step()
    return float(loss)  # here


@refused("turned into text")
def text(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    optimizer.step()
    return str(loss.item())  # here


@refused("turned into text")
def formatting(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    optimizer.step()
    return f"{loss.item():.2f}"  # here


@refused("numpy()")
def to_numpy(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    return loss.numpy().item()  # here


@refused("tolist()")
def to_list(model: Any, optimizer: Any, x: Tensor) -> Any:
    return backward(model, optimizer, x).tolist()  # here


@refused("shape depends on values")
def shapes(model: Any, optimizer: Any, x: Tensor) -> Any:
    return backward(model, optimizer, x[x[:, 0] > 0])  # here


@refused("is sparse")
def sparse(model: Any, optimizer: Any, x: Tensor) -> Any:
    backward(model, optimizer, x)
    _TABLE(torch.zeros(2, dtype=torch.long)).sum().backward()


@refused("what a scaler may leave out")
def gated(model: Any, optimizer: Any, x: Tensor) -> Any:
    """The closure's loss is of the update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    made: Any = scaler.step(optimizer, lambda: x.sum().clone())
    return None if made is None else made.add_(1)  # here


@refused("computed from tensors")
def comparison(model: Any, optimizer: Any, x: Tensor) -> Any:
    backward(model, optimizer, x)
    return torch.equal(x, x.clone())  # here


@refused("random numbers are seeded")
def seeding(model: Any, optimizer: Any, x: Tensor) -> Any:
    torch.manual_seed(3)  # here
    return backward(model, optimizer, x + torch.rand(3, 6))


@refused("does not see it")
def hidden_draw(model: Any, optimizer: Any, x: Tensor) -> Any:
    x = x + torch.rand(3, 6)
    torch.default_generator.manual_seed(4)
    return backward(model, optimizer, x * torch.rand(3, 6))  # here


@refused("memory that is not PyTorch's")
def from_numpy(model: Any, optimizer: Any, x: Tensor) -> Any:
    other = torch.from_numpy(_ONES[0])  # here
    return backward(model, optimizer, x * other)


@refused("made from a ndarray")
def from_array(model: Any, optimizer: Any, x: Tensor) -> Any:
    other = torch.tensor(_ONES[0])  # here
    return backward(model, optimizer, x * other)


@refused("no variable of the step holds")
def from_an_iterator(model: Any, optimizer: Any, x: Tensor) -> Any:
    return backward(model, optimizer, x * next(_DRAWN))  # here


@refused("read after the scheduler's step")
def early_schedule(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    schedule_of(optimizer).step()
    optimizer.step()  # here
    return loss


@refused("read after the scheduler's step")
def late_rate(model: Any, optimizer: Any, x: Tensor) -> Any:
    backward(model, optimizer, x)
    optimizer.step()
    schedule_of(optimizer).step()
    return optimizer.param_groups[0]["lr"]


@refused("the step sets lr")
def own_schedule(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5
    return loss


@refused("resized")
def resizing(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    torch.empty(2).resize_(200)  # here
    return loss


@refused("call backward")
def no_backward(model: Any, optimizer: Any, x: Tensor) -> Any:
    return model(x).sum()


@refused("is replaced in the step")
def replaced(model: Any, optimizer: Any, x: Tensor) -> Any:
    loss = backward(model, optimizer, x)
    with torch.no_grad():
        model.weight.data = model.weight.data * 0.5
    return loss


@refused("it returns a Linear")
def returned(model: Any, optimizer: Any, x: Tensor) -> Any:
    backward(model, optimizer, x)
    return model


_TABLE = nn.Embedding(4, 2, sparse=True)
_ONES = [torch.ones(6).numpy()]
_DRAWN = iter([torch.ones(6) for _ in range(9)])


def line_of(body: Body) -> int | None:
    lines, first = inspect.getsourcelines(body)
    return next(
        (first + n for n, text in enumerate(lines) if text.rstrip().endswith("# here")), None
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_named_and_still_runs(name: str) -> None:
    body, construct = REFUSED[name]
    job, plain = job_of(body), job_of(body)
    expected = plain.step(*plain.batches[1])
    recorded = job.record()
    assert recorded.program is None
    assert isinstance(recorded.refusal, NotCapturable)
    assert construct in recorded.refusal.message
    line = line_of(body)
    where, *_ = recorded.refusal.where.split(" (in ")
    assert where == (f"{__file__}:{line}" if line else "")
    if not isinstance(expected, nn.Module):
        assert type(recorded.result) is type(expected)
        assert repr(recorded.result) == repr(expected)
    same(job, plain)


def same(one: Job, two: Job) -> None:
    for left, right in zip(one.everything(), two.everything(), strict=True):
        assert torch.equal(left, right)


def test_state_that_the_step_makes_is_not_steady() -> None:
    job = residual_job()
    job.optimizer.state.clear()
    recorded = job.record()
    assert recorded.refusal is not None
    assert "the optimizer made" in str(recorded.refusal)


def test_an_exception_of_the_step_is_its_own_and_nothing_stays_patched() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        if len(x) == 2:
            raise KeyError("mine")
        return backward(model, optimizer, x)

    job = job_of(body)
    before = torch.get_rng_state, torch.optim.lr_scheduler.LRScheduler.step
    job.batches = [(torch.ones(2, 6),)] * 2
    with pytest.raises(KeyError, match="mine"):
        job.record()
    assert before == (torch.get_rng_state, torch.optim.lr_scheduler.LRScheduler.step)
    assert job.optimizer.param_groups[0]["lr"] == 0.1
    assert "__format__" not in vars(torch.SymFloat)


def test_numbers_stay_symbolic_and_the_result_is_a_float() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = backward(model, optimizer, x)
        optimizer.step()
        return {"loss": 2 * loss.item() + 1, "steps": 3}

    job, plain = job_of(body), job_of(body)
    recorded = job.record()
    assert recorded.program is not None
    assert type(recorded.result["loss"]) is float
    assert recorded.result == plain.step(*plain.batches[1])
    found = operators(recorded.program)
    for batch in job.batches[2:]:
        assert run(found, range(len(found.nodes)), batch) == plain.step(*batch)
    same(job, plain)


def test_a_new_learning_rate_needs_no_new_program() -> None:
    job, plain = residual_job(), residual_job()
    torch.manual_seed(2)
    program = job.program()
    torch.manual_seed(2)
    plain.step(*plain.batches[1])
    scalars = [one for one in program.inputs if one.kind is Kind.SCALAR]
    assert [one.place.path.split(".")[1] for one in scalars] == [
        "param_groups[0]['lr']",
        "param_groups[0]['betas'][0]",
        "param_groups[0]['betas'][1]",
    ]
    assert not program.pins
    found = operators(program)
    for rate, betas in ((0.1, (0.8, 0.99)), (0.02, (0.5, 0.9))):
        for one in (job, plain):
            one.optimizer.param_groups[0].update(lr=rate, betas=betas)
        torch.manual_seed(1)
        expected = plain.step(*plain.batches[2])
        torch.manual_seed(1)
        assert torch.equal(run(found, range(len(found.nodes)), job.batches[2]), expected)
        same(job, plain)


def test_a_branch_on_a_hyperparameter_is_pinned() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = backward(model, optimizer, x)
        if optimizer.param_groups[0]["lr"] > 0.05:
            optimizer.step()
        return loss

    job = job_of(body)
    (pin,) = job.program().pins
    assert pin.holds()
    job.optimizer.param_groups[0]["lr"] = 0.06
    assert pin.holds()
    job.optimizer.param_groups[0]["lr"] = 0.04
    assert not pin.holds()


def test_tensors_of_closures_and_globals_are_inputs() -> None:
    scale = torch.full((), 2.0)

    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = backward(model, optimizer, x * scale + SCALE["of"])
        scale.mul_(0.5)
        return loss

    job = job_of(body)
    program = job.program()
    reached = {one.place.path for one in program.inputs if one.kind is Kind.REACHED}
    assert reached == {"scale", "SCALE['of']"}
    SCALE["of"] = torch.zeros(())
    try:
        found = operators(program)
        before = float(scale)
        got = run(found, range(len(found.nodes)), job.batches[2])
        assert torch.equal(got, job.model(job.batches[2][0] * before).square().mean().detach())
        assert float(scale) == before / 2
    finally:
        SCALE["of"] = torch.ones(())


def test_tensors_carried_in_attributes_are_carried_on() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        hidden = model.hidden if hasattr(model, "hidden") else torch.zeros(())
        loss = backward(model, optimizer, x * (1 + hidden))
        optimizer.step()
        model.hidden = loss / 2
        return loss

    job, plain = job_of(body), job_of(body)
    program = job.program()
    plain.step(*plain.batches[1])
    found = operators(program)
    for batch in job.batches[2:]:
        assert torch.equal(run(found, range(len(found.nodes)), batch), plain.step(*batch))
        assert torch.equal(job.model.hidden, plain.model.hidden)  # type: ignore[arg-type]
    same(job, plain)


def test_gradients_of_parameters_that_were_not_named_are_left() -> None:
    other = nn.Linear(6, 6)

    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        other.zero_grad()
        return backward(model, optimizer, other(x))

    job = job_of(body)
    found = operators(job.program())
    assert other.weight.grad is not None
    before = other.weight.grad.clone()
    run(found, range(len(found.nodes)), job.batches[2])
    assert not torch.equal(other.weight.grad, before)


def test_a_schedule_within_the_step_goes_on_with_it() -> None:
    def make() -> Job:
        schedules: list[Any] = []

        def body(model: Any, optimizer: Any, x: Tensor) -> Any:
            if not schedules:
                schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
            loss = backward(model, optimizer, x)
            optimizer.step()
            rate = schedules[0].get_last_lr()[0]
            schedules[0].step()
            return loss, rate

        return job_of(body)

    job, plain = make(), make()
    recorded = job.record()
    assert recorded.program is not None
    expected = plain.step(*plain.batches[1])
    assert recorded.result[1] == expected[1] == 0.05
    found = operators(recorded.program)
    for rate, batch in zip((0.025, 0.0125), job.batches[2:], strict=True):
        got, wanted = run(found, range(len(found.nodes)), batch), plain.step(*batch)
        assert torch.equal(got[0], wanted[0])
        assert got[1] == wanted[1] == rate
    same(job, plain)
    assert job.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


def test_indexing_by_numbers_is_captured() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x)[torch.arange(3), x.argmax(1)].sum()
        loss.backward()
        return loss.detach()

    job, plain = job_of(body), job_of(body)
    found = operators(job.program())
    for batch in job.batches[2:]:
        assert torch.equal(run(found, range(len(found.nodes)), batch), plain.step(*batch))


def test_a_fault_of_ours_ends_the_recording_and_runs_no_operator_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> Any:
        raise KeyError("ours")

    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = backward(model, optimizer, x)
        optimizer.step()
        return loss.clone().add_(1)

    job, plain = job_of(body), job_of(body)
    monkeypatch.setattr(Operators, "add", fail)
    recorded = job.record()
    assert recorded.program is None
    assert "a fault of memplan: KeyError('ours')" in str(recorded.refusal)
    assert torch.equal(recorded.result, plain.step(*plain.batches[1]))
    same(job, plain)


def test_constants_are_made_anew_in_each_step() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Any:
        weights = torch.tensor([1.0, 2.0, 3.0])
        weights += 1
        backward(model, optimizer, x * weights[:, None])
        return weights

    job = job_of(body)
    found = operators(job.program())
    for batch in job.batches[2:]:
        assert run(found, range(len(found.nodes)), batch).tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_leaves_out_the_update_within_the_graph(bad: bool) -> None:
    def make() -> Job:
        job = residual_job()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

        def step(x: Tensor, y: Tensor) -> Tensor:
            job.optimizer.zero_grad()
            loss = F.cross_entropy(job.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(job.optimizer)
            scaler.update()
            return loss.detach() * scaler._scale  # type: ignore[operator]

        job.step = step
        torch.manual_seed(5)
        step(*job.batches[0])
        return job

    job, plain = make(), make()
    torch.manual_seed(6)
    program = job.program()
    torch.manual_seed(6)
    plain.step(*plain.batches[1])
    found = operators(program)
    for number in (2, 3, 4):
        x, y = job.batches[number]
        if bad and number == 3:
            x = x * float("inf")
        torch.manual_seed(7)
        expected = plain.step(x, y)
        torch.manual_seed(7)
        got = run(found, range(len(found.nodes)), (x, y))
        assert torch.equal(got, expected) or (bad and bool(got.isnan()))
        if bad and number == 3:
            plain.model.load_state_dict(copy.deepcopy(job.model.state_dict()))  # NaN statistics
            for net in (*job.model.modules(), *plain.model.modules()):
                if isinstance(net, nn.BatchNorm2d):
                    net.reset_running_stats()
            continue
        same(job, plain)


def test_a_scaler_that_skips_while_recorded_asks_for_another_call() -> None:
    job = residual_job()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(x: Tensor, y: Tensor) -> None:
        job.optimizer.zero_grad()
        scaler.scale(F.cross_entropy(job.model(x), y)).backward()
        scaler.step(job.optimizer)
        scaler.update()

    job.step = step
    job.step(*job.batches[0])
    x, y = job.batches[1]
    job.batches = [job.batches[0], (x * float("nan"), y)]
    refusal = job.record().refusal
    assert isinstance(refusal, NotCapturable)
    assert refusal.later
    assert not torch.isnan(job.model.get_parameter("head.weight")).any()


def test_fan_in_and_biases_are_added_in_place() -> None:
    program = residual_job().program()
    targets = [str(node.target) for node in program.graph_module.graph.nodes]
    backward_adds = [
        node
        for node in program.graph_module.graph.nodes
        if str(node.target) == "aten.add.Tensor" and facts_of(node).backward
    ]
    assert not backward_adds
    assert "aten.add_.Tensor" in targets


def test_a_fake_model_is_captured() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Linear(10_000, 20_000), nn.ReLU(), nn.Linear(20_000, 10))
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        program = capture_step(
            step, model=model, optimizer=optimizer, args=(torch.ones(4, 10_000),)
        )
    graph = operators(program).graph
    assert graph.base_bytes > 3 * 4 * 200_000_000
    assert any("addcdiv_" in name for name in graph.name)


def test_capture_step_raises_what_record_step_notes() -> None:
    job = job_of(branch)
    with pytest.raises(NotCapturable, match="a branch on the value of a tensor"):
        capture_step(job.step, model=job.model, optimizer=job.optimizer, args=job.batches[0])


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
