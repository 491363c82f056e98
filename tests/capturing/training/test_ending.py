"""When a capture ends, and what it still sees before it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memplan.capturing.training import watcher as steps_module
from memplan.types.errors import CaptureError
from memplan.types.trace import Phase
from tests.capturing.training.scripts import EPOCHS, indented, run


def test_stops_when_a_step_repeats(tmp_path: Path) -> None:
    trace = run(tmp_path, "x = torch.randn(4, 512)\nwhile True:\n" + indented("x", 4))
    assert trace.meta.optimizer_steps == 3
    assert "same memory as the step before" in trace.meta.stop_reason


WARMING_UP = """
x = torch.randn(4, 512)
with torch.cuda.stream(torch.cuda.Stream()):
    for _ in range({steps}):
        forward(x).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_steps_that_warm_up_for_a_graph_are_not_the_job(tmp_path: Path) -> None:
    body = WARMING_UP.format(steps=5) + "y = torch.empty(1 << 20, device='cuda')\n"
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps == 5
    assert 4 << 20 in trace.events.bytes


def test_a_job_on_a_stream_of_its_own_ends_too(tmp_path: Path) -> None:
    trace = run(tmp_path, WARMING_UP.format(steps=1000))
    assert trace.meta.optimizer_steps == 16
    assert "same memory as the step before" in trace.meta.stop_reason


@pytest.mark.parametrize(
    ("before", "header"),
    [
        ("loss = torch.tensor(9.0).cuda() + forward(x).detach()", "loss > 2.5"),
        ("done = forward(x) < 0", "not done"),
        ("count, loss = 0, forward(x)", "count < 99 and not (loss < 2.5)"),
        ("loss = forward(x)", "loss.item() > 2.5"),
        ("loss = forward(x)", "abs(0.1 - loss.item()) >= 7"),
        ("loss = forward(x)", "not torch.allclose(loss, loss + 1)"),
    ],
)
def test_a_loop_on_the_loss_goes_on_until_a_step_repeats(
    tmp_path: Path, before: str, header: str
) -> None:
    body = f"""
x = torch.randn(4, 512)
{before}
def train_step():
    loss = forward(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
while {header}:
    loss = train_step()
    done = loss < 2.5
"""
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps in (3, 4)  # the first has the `loss` from before
    assert "same memory as the step before" in trace.meta.stop_reason
    assert "loop" in [item.kind for item in trace.meta.assumptions]


def test_what_comes_after_a_loop_on_the_loss_is_seen(tmp_path: Path) -> None:
    body = """
loss = forward(torch.randn(4, 512)).detach()
while loss > 2.5:
    for (batch,) in loader:
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():
    forward(torch.randn(1024, 512))
"""
    events = run(tmp_path, body).events
    assert events.bytes[events.phase == Phase.EVALUATION].max() == 1024 * 512 * 4


def test_evaluation_after_the_epoch_is_seen(tmp_path: Path) -> None:
    trace = run(tmp_path, EPOCHS)
    events = trace.events
    evaluated = events.phase == Phase.EVALUATION
    assert events.bytes[evaluated].max() == 1024 * 512 * 4
    assert trace.meta.optimizer_steps == 4  # one more after the epoch that was cut short


def test_an_evaluation_that_keeps_gradients_is_seen(tmp_path: Path) -> None:
    """Neither `eval()` nor `no_grad()`: it is no training as long as nothing runs backward."""
    trace = run(tmp_path, EPOCHS.replace("with torch.no_grad():", "if epoch == 0:"))
    of_a_batch = trace.events.bytes == 4 * 1024 * 512
    assert of_a_batch.sum() > 2, "its inputs and what the layer makes of them"
    assert trace.meta.optimizer_steps == 4


def test_a_script_that_stumbles_over_a_short_epoch_was_seen(tmp_path: Path) -> None:
    check = """
seen = 0
for (batch,) in loader:
    forward(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen += 1
assert seen == len(loader), "an epoch is incomplete"
"""
    trace = run(tmp_path, check)
    assert trace.meta.optimizer_steps == 3
    (assumption,) = [item for item in trace.meta.assumptions if item.kind == "ending"]
    assert "AssertionError: an epoch is incomplete" in assumption.text
    assert assumption.source.endswith("train.py:19")


def test_checks_of_unknown_values_pass(tmp_path: Path) -> None:
    """What an `assert` or an `if … raise` asks for is taken to be as it should."""
    checks = """
before, after = (torch.randn(8, device="cuda") for _ in range(2))
assert not torch.equal(before, after)
assert not torch.allclose(before, after), "training changed nothing"
assert (before < after).any() and not (before == after).all()
if not (before > 0).any() or torch.equal(before, after):
    raise ValueError("no positive score")
forward(torch.randn(4, 512)).backward()
optimizer.step()
"""
    assert run(tmp_path, checks).meta.optimizer_steps == 1


def test_a_check_passes_however_often_it_is_made(tmp_path: Path) -> None:
    """Another condition changes its mind after a thousand times, and ends a job after more."""
    checks = """
weight = torch.randn(2, device="cuda")
equal = (weight == weight).all()
for layer_of_a_microbatch in range(20_010):
    assert equal
forward(torch.randn(4, 512)).backward()
optimizer.step()
"""
    assert run(tmp_path, checks).meta.optimizer_steps == 1


def test_a_step_after_a_backward_of_the_engine_itself_counts(tmp_path: Path) -> None:
    """As Megatron-LM's pipeline calls it."""
    step = """
loss = forward(torch.randn(4, 512))
torch.autograd.Variable._execution_engine.run_backward(
    tensors=(loss,), grad_tensors=(torch.ones_like(loss),), keep_graph=False, create_graph=False,
    inputs=(), allow_unreachable=True, accumulate_grad=True,
)
optimizer.step()
"""
    assert run(tmp_path, step).meta.optimizer_steps == 1


def test_as_many_steps_as_asked(tmp_path: Path) -> None:
    trace = run(tmp_path, EPOCHS, steps=5)
    assert trace.meta.optimizer_steps == 5
    assert "as asked" in trace.meta.stop_reason


def test_steps_that_differ_are_an_assumption(tmp_path: Path) -> None:
    body = "n = 1\nwhile True:\n    n += 1\n" + indented("torch.randn(n, 512)", 4)
    trace = run(tmp_path, body)
    assert [a.kind for a in trace.meta.assumptions] == ["steady-step"]


def test_a_second_optimizer_that_steps_now_and_then_is_no_unrest(tmp_path: Path) -> None:
    """A critic that is trained in every step, an actor in every second."""
    body = """
actor = nn.Linear(512, 512, device="cuda")
second = torch.optim.Adam(actor.parameters())
for step in range(1000):
    x = torch.ones(4, 512, device="cuda")
    forward(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        forward(actor(x)).backward()
        second.step()
        second.zero_grad()
"""
    trace = run(tmp_path, body)
    assert "the last 2 asked for the same memory as the 2 before" in trace.meta.stop_reason
    assert not trace.meta.assumptions


ACCUMULATING = """
for step in range(50):
    for micro in range(20):
        loss = forward(torch.randn(4, 512))
        loss.backward()
    {clip}
    optimizer.step()
    optimizer.zero_grad(set_to_none={to_none})
"""


def test_a_long_step_need_not_be_run_a_third_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = ACCUMULATING.format(clip="", to_none=True)
    assert run(tmp_path, body).meta.optimizer_steps == 3
    monkeypatch.setattr(steps_module, "_LONG_STEP", 50)
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps == 2
    assert trace.meta.steady_steps == [1, 2]
    backward = trace.ops.phase == Phase.BACKWARD
    assert (backward & (trace.ops.step == 0)).sum() == (backward & (trace.ops.step == 1)).sum()


@pytest.mark.parametrize(
    ("clip", "to_none", "steps"),
    [
        ("", False, 3),  # gradients are added to from the first micro-batch of the second step on
        ("kept = torch.zeros(step + 1, 512).cuda()", True, 16),
        ("forward(torch.randn(4 + 4 * (step == 1), 512))", True, 4),
    ],
)
def test_a_long_step_that_is_not_like_the_first_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: str, to_none: bool, steps: int
) -> None:
    monkeypatch.setattr(steps_module, "_LONG_STEP", 50)
    body = ACCUMULATING.format(clip=clip, to_none=to_none)
    assert run(tmp_path, body).meta.optimizer_steps == steps


def test_forwards_without_a_backward_between_them_end_nothing(tmp_path: Path) -> None:
    """As a pipeline's warm-up: memory climbs until the first backward."""
    body = """
for step in range(50):
    losses = []
    for micro in range(24):
        losses.append(forward(torch.randn(4, 512)))
        if micro >= 20:
            losses.pop(0).backward()
    while losses:
        losses.pop(0).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps == 3
    forwards = (trace.ops.phase == Phase.FORWARD) & (trace.ops.step == 1)
    names = np.array(trace.strings)[trace.ops.name[forwards]]
    assert (names == "aten.addmm.default").sum() == 24


AUGMENTED = """
class Images(torch.utils.data.Dataset):
    augment = nn.Sequential(nn.Flatten(0), nn.Dropout(0.5))
    def __len__(self):
        return 640
    def __getitem__(self, number):
        return (self.augment(torch.rand(512)),)
"""


def test_what_transforms_data_is_no_model(tmp_path: Path) -> None:
    """Neither for the steps nor, once enough was seen, for the evaluation that follows."""
    body = AUGMENTED + EPOCHS.replace("TensorDataset(torch.randn(4096, 512))", "Images()").replace(
        "batch_size=1024", "batch_size=320"
    )
    body = body.replace("in loader:", "in DataLoader(Images(), batch_size=64):")
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps == 4
    evaluated = trace.events.phase == Phase.EVALUATION
    assert trace.events.bytes[evaluated].max() == 320 * 512 * 4


def test_processes_forked_while_loaders_run_dry_are_on_their_own(tmp_path: Path) -> None:
    """What a worker reads does not run dry with what the script reads."""
    read = "assert sum(1 for _ in DataLoader(range(40), batch_size=4)) == 10\n        return ("
    body = AUGMENTED.replace("return (", read) + EPOCHS.replace(
        "DataLoader(TensorDataset(torch.randn(4096, 512)), batch_size=1024)",
        "DataLoader(Images(), batch_size=320, num_workers=1)",
    )
    trace = run(tmp_path, body)
    assert (trace.events.bytes == 320 * 512 * 4).any(), "the evaluation was reached"
    assert not trace.meta.assumptions


def test_an_optimizer_that_has_yet_to_step_is_waited_for(tmp_path: Path) -> None:
    """The generator of a GAN that is trained now and then."""
    body = """
other = nn.Linear(512, 1024, device="cuda")
second = torch.optim.Adam(other.parameters())
for step in range(1000):
    forward(torch.ones(4, 512)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % {every} == {every} - 1:
        other(torch.ones(1024, 512, device="cuda")).sum().backward()
        second.step()
        second.zero_grad()
"""
    trace = run(tmp_path, body.format(every=6))
    assert trace.meta.optimizer_steps == 15 and not trace.meta.assumptions
    trace = run(tmp_path, body.format(every=100))
    assert {item.kind for item in trace.meta.assumptions} == {"optimizer"}


def test_checkpointed_blocks_are_no_micro_batches(tmp_path: Path) -> None:
    """They run again in backward, each as a root of its own; steps are seen whole all the same."""
    body = """
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(20)).cuda()

class Stack(nn.Module):
    def forward(self, x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

stack = Stack()
optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
for step in range(50):
    stack(torch.randn(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps == 3
    assert "the same memory as the step before" in trace.meta.stop_reason


def test_allocator_settings_of_the_script(tmp_path: Path) -> None:
    body = "torch.cuda.memory._set_allocator_settings('expandable_segments:True')\n"
    loop = "while True:\n" + indented("torch.randn(4, 512)", 4)
    assert run(tmp_path, body + loop).meta.alloc_conf == "expandable_segments:True"
    in_environment = "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:64'\n"
    assert run(tmp_path, in_environment + loop).meta.alloc_conf == "max_split_size_mb:64"


def test_a_convolution_on_the_cpu_asks_nothing_of_the_gpu(tmp_path: Path) -> None:
    body = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    optimizer.step()
"""
    with pytest.raises(CaptureError, match="CPU only"):
        run(tmp_path, body, head="")
