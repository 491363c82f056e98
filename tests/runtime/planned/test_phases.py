"""What hooks tell of a job: steps of every shape, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan.runtime.planned import phases
from memplan.runtime.planned.phases import PhaseCursor
from memplan.types.trace import Phase
from tests.runtime.planned.listening import listening


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _train(
    model: Callable[..., Any], optimizer: torch.optim.Optimizer, micro_batches: int = 1
) -> None:
    for _ in range(micro_batches):
        model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_plain_loop() -> None:
    model = _model()
    optimizer = _sgd(model)
    with listening() as (heard, _):
        _train(model, optimizer)
        _train(model, optimizer)
    assert heard.text == "F B O | F B O | F"


def test_a_step_that_calls_its_base_classs_counts_once() -> None:
    class Wrapped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = _model()
    _sgd(model)  # from here on the base class's step has hooks as well
    with listening() as (heard, _):
        _train(model, Wrapped(model.parameters(), lr=0.1))
    assert heard.text == "F B O | F"


def test_accumulated_micro_batches() -> None:
    model = _model()
    with listening() as (heard, _):
        _train(model, _sgd(model), micro_batches=3)
    assert heard.text == "F B F B F B O | F"


def test_a_loss_that_is_a_module_belongs_to_the_forward_pass() -> None:
    model, loss = _model(), nn.CrossEntropyLoss()
    optimizer = _sgd(model)
    with listening() as (heard, _):
        loss(model(torch.randn(2, 4)), torch.tensor([0, 1])).backward()
        optimizer.step()
    assert heard.text == "F B O | F"


def test_an_evaluation_between_steps_and_one_within_a_step() -> None:
    model, teacher = _model(), _model()
    optimizer = _sgd(model)
    with listening() as (heard, _):
        _train(model, optimizer)
        with torch.no_grad():
            model(torch.randn(2, 4))
            model(torch.randn(2, 4))
        out = model(torch.randn(2, 4))
        with torch.inference_mode():
            teacher(torch.randn(2, 4))
        out.sum().backward()
        optimizer.step()
    assert heard.text == "F B O | F E (F) E (F) F E (F) B O | F"


def test_an_evaluation_before_the_first_step_is_set_up() -> None:
    model = _model()
    with listening() as (heard, _), torch.no_grad():
        model(torch.randn(2, 4))
    assert heard.text == "E (setup)"


def test_a_checkpointed_block_that_runs_again_is_no_forward_pass() -> None:
    block = _model()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    model = Model()
    optimizer = _sgd(model)
    with listening() as (heard, _):
        _train(model, optimizer)
        _train(model, optimizer)
    assert heard.text == "F B O | F B O | F"


def test_two_optimizers_make_one_step() -> None:
    generator, critic = _model(), _model()
    first, second = _sgd(critic), _sgd(generator)
    with listening() as (heard, _):
        for _ in range(2):
            _train(critic, first)
            _train(generator, second)
    assert heard.text == "F B O | F B O F B O | F B O F"


def test_an_optimizer_that_runs_the_model_itself() -> None:
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with listening() as (heard, _):
        optimizer.step(closure)
    assert heard.text == "F B F B F B | F"


def test_optimizers_that_step_within_the_backward_pass() -> None:
    model = _model()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    with listening() as (heard, _):
        for _step in range(2):
            model(torch.randn(2, 4)).sum().backward()
    assert heard.text == "F B | F B |"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: {"loss": out.sum(), "rest": [out]},
        lambda out: (None, [out, 3]),
        lambda out: type("Output", (), {})(),
    ],
)
def test_outputs_of_any_shape(wrap: Callable[[torch.Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()

        def forward(self, x: torch.Tensor) -> Any:
            out = self.inner(x)
            self.last = out.sum()
            found = wrap(out)
            if not isinstance(found, (dict, tuple)):
                found.logits = out
            return found

    model = Model()
    with listening() as (heard, _):
        output = model(torch.randn(2, 4))
        tensors = [output.logits] if hasattr(output, "logits") else []
        tensors += [output["loss"]] if isinstance(output, dict) else []
        tensors += [output[1][0]] if isinstance(output, tuple) else []
        tensors[0].sum().backward()
    assert heard.text == "F B"


def test_a_forward_pass_that_fails_is_forgotten() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Model()
    with listening(modules=True) as (heard, _):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
        _train(model, _sgd(model))
    assert heard.text == "F B O | F"
    # Forward of both calls, and backward of the second.
    assert heard.modules.count("Model.inner") == 3


def test_interrupted_forward_passes_are_forgotten() -> None:
    class Model(nn.Module):
        interrupted = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.interrupted:
                raise KeyboardInterrupt
            return x * 2

    model = Model()
    with listening() as (heard, _):
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, requires_grad=True))
        model.interrupted = False
        model(torch.randn(2, requires_grad=True)).sum().backward()
    assert heard.text == "F B"


def test_in_place_operators_behind_a_hooked_module() -> None:
    """The pattern that full-backward hooks break."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
    plain = copy.deepcopy(model)
    x = torch.randn(2, 1, 5, 5)
    with listening(modules=True) as (heard, _):
        model(x).sum().backward()
    plain(x).sum().backward()
    assert heard.text == "F B"
    for hooked, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(hooked.grad, reference.grad)  # type: ignore[arg-type]


def test_modules_that_hold_others_are_named_in_forward_and_backward() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4)), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    )
    with listening(modules=True) as (heard, _):
        model(torch.randn(2, 4)).sum().backward()
    outer = "Sequential"
    forward = [outer, "Sequential.0", outer, "Sequential.2", outer, ""]
    assert heard.modules == [*forward, "Sequential.2", "Sequential.0"]


def test_a_root_without_modules_is_a_root() -> None:
    model = nn.Linear(4, 2)
    with listening() as (heard, hooks):
        _train(model, _sgd(model))
        hooks.watch_roots()
        _train(model, _sgd(model))
    assert heard.text.startswith("F B O | F B O")


def test_only_roots_keep_hooks_and_their_copies_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "has_compiled", lambda: False)  # in an earlier test
    model = _model()
    optimizer = _sgd(model)
    with listening() as (heard, hooks):
        _train(model, optimizer)
        hooks.watch_roots()
        assert not model[0]._forward_hooks
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        heard.words.clear()
        twin(torch.randn(2, 4)).sum().backward()
        assert heard.text == ""
        _train(model, optimizer)
        assert heard.text == "F B O | F".removeprefix("F ")  # it was in a forward pass already
        hooks.watch_all(modules=False)
        assert not model._forward_hooks
        _train(model, optimizer)
    assert heard.text == "B O | F B O | F"
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_hooks_keep_no_output_alive() -> None:
    model = _model()
    with listening(modules=True):
        out = model(torch.randn(2, 4))
        gone = weakref.ref(out)
        del out
        gc.collect()
        assert gone() is None


def test_a_compiled_model_is_not_compiled_again_when_it_is_known() -> None:
    compiled_graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = _model()
    compiled = torch.compile(model, backend=backend)
    optimizer = _sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with listening() as (heard, hooks):
            _train(compiled, optimizer)
            _train(compiled, optimizer)
            hooks.watch_roots()
            _train(compiled, optimizer)
    assert heard.text == "F B O | F B O | F B O | F"
    assert len(compiled_graphs) == 1


def test_the_cursor_walks_round_and_round() -> None:
    phases = ["forward 0", "backward 0", "other 0", "forward 1", "backward 1", "optimizer 1"]
    cursor = PhaseCursor(phases)
    kinds = [Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert [cursor.enter(kind) for kind in (*kinds, *kinds)] == [0, 1, 3, 4, 5] * 2


def test_the_cursor_keeps_its_place_over_what_the_plan_does_not_know() -> None:
    cursor = PhaseCursor(["forward 0", "backward 0", "optimizer 0"])
    assert cursor.enter(Phase.FORWARD) == 0
    assert cursor.enter(Phase.EVALUATION) == -1
    assert cursor.enter(Phase.BACKWARD) == 1
    assert cursor.enter(Phase.OPTIMIZER) == 2
    assert cursor.enter(Phase.FORWARD) == cursor.enter(Phase.FORWARD) == 0


def test_a_plan_without_phases_knows_none() -> None:
    assert PhaseCursor([]).enter(Phase.FORWARD) == -1
