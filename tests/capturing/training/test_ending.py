"""When a capture ends, and what it still sees before it does."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from memplan.capturing.job.oom_handlers import oom_note
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.capturing.session import CaptureSession
from memplan.capturing.training import watcher as steps_module
from memplan.capturing.training.ending import Ending
from memplan.simulate import simulate
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError, MemplanError, UsageError
from memplan.types.trace import Phase, Trace

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(4096, 512)), batch_size=4)

def forward(batch):
    return model(batch.cuda()).square().mean()
"""

EPOCHS = """
for epoch in range(10):
    for (batch,) in loader:
        forward(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for (batch,) in DataLoader(TensorDataset(torch.randn(4096, 512)), batch_size=1024):
            forward(batch)
"""


def run(tmp_path: Path, body: str, *, steps: int | None = None, head: str = HEAD) -> Trace:
    script = tmp_path / "train.py"
    (tmp_path / "helper.py").write_text("x = 1\n  y = 2\n")
    script.write_text(head + body)
    options = CaptureOptions(profile=find_profile("rtx4090"), steps=steps)
    return capture_script(ScriptTarget("script", str(script)), options)


def test_stops_when_a_step_repeats(tmp_path: Path) -> None:
    trace = run(tmp_path, "x = torch.randn(4, 512)\nwhile True:\n" + _indented("x", 4))
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
    assert trace.meta.optimizer_steps == 3


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
    body = "n = 1\nwhile True:\n    n += 1\n" + _indented("torch.randn(n, 512)", 4)
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
    assert [item.kind for item in trace.meta.assumptions] == ["optimizer"]


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


def test_a_script_that_swallows_everything_still_stops(tmp_path: Path) -> None:
    body = """
while True:
    try:
        forward(torch.randn(4, 512)).backward()
        optimizer.step()
        optimizer.zero_grad()
    except Exception:
        print("ignored")
"""
    assert run(tmp_path, body).meta.optimizer_steps == 3


PRINTS_AND_EXITS = """
import sys
try:
    {}
except Exception as error:
    print(error)
    sys.exit(1)
"""
"""As Hydra does around a job."""


def test_a_short_epoch_that_ends_in_an_exit_code(tmp_path: Path) -> None:
    counted = """
seen = 0
for (batch,) in loader:
    forward(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen += 1
assert seen == len(loader)"""
    trace = run(tmp_path, PRINTS_AND_EXITS.format(counted.replace("\n", "\n    ")))
    assert trace.meta.optimizer_steps == 3
    assert any("AssertionError" in said.text for said in trace.meta.assumptions)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("forward(torch.randn(4, 512))", CaptureError, "without a single optimizer step"),
        ("raise ValueError('no such file')", CaptureError, r"train.py:\d+.*ValueError: no such"),
        ("for x in range(3)\n    pass", CaptureError, r"train.py:12: SyntaxError: expected ':'\n"),
        (
            "import helper",
            CaptureError,
            r"helper.py:2: IndentationError: unexpected indent\n",
        ),
        ("import sys; sys.exit(3)", CaptureError, "exit code 3"),
        ("import sys; sys.exit('no data')", CaptureError, "exit code 1: no data before"),
        (PRINTS_AND_EXITS.format("{}['lr']"), CaptureError, r"train.py:\d+: .*KeyError: 'lr'"),
        (
            PRINTS_AND_EXITS.format("torch.hub.load('owner/name', 'model')"),
            CaptureError,
            r"wanted to reach github.com",
        ),
        (
            "import argparse as a; p = a.ArgumentParser(); p.add_argument('d'); p.parse_args()",
            UsageError,
            "refused its arguments",
        ),
    ],
)
def test_bad_scripts(tmp_path: Path, body: str, error: type[MemplanError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        run(tmp_path, body)
    assert raised.value.hint


def test_arguments_that_a_script_refuses(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse; argparse.ArgumentParser().parse_args()")
    options = CaptureOptions(profile=find_profile("rtx4090"))
    with pytest.raises(UsageError) as raised:
        capture_script(ScriptTarget("script", str(script), ("--nope",)), options)
    assert raised.value.hint.startswith(f"python {script} --help")


def test_a_package_that_a_script_misses(tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as raised:
        run(tmp_path, "raise ImportError('Make sure to install tensorboard for logging.')")
    assert raised.value.hint.startswith("install what it asks for")


def test_a_misspelt_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    options = CaptureOptions(profile=find_profile("rtx4090"))
    with pytest.raises(CaptureError, match=r"No module named jobs\.trian") as raised:
        capture_script(ScriptTarget("module", "jobs.trian"), options)
    assert raised.value.hint.startswith("the right name")


def test_a_script_on_the_cpu(tmp_path: Path) -> None:
    body = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
    with pytest.raises(CaptureError, match="CPU only"):
        run(tmp_path, body, head="")


def test_a_script_that_is_not_there() -> None:
    options = CaptureOptions(profile=find_profile("rtx4090"))
    with pytest.raises(UsageError, match="no such script"):
        capture_script(ScriptTarget("script", "nowhere/train.py"), options)


def test_a_script_finds_what_lies_beside_it_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    main = sys.modules["__main__"]
    (tmp_path / "train.py").write_text(
        "import os, pathlib, pickle, sys\n"
        "class Config: pass\n"
        "assert sys.argv == ['train.py', '--x'], sys.argv\n"
        "assert isinstance(pickle.loads(pickle.dumps(Config())), Config)\n"
        "os.chdir('elsewhere')\n"
        "assert pathlib.Path(__file__).read_text()\n"
        + HEAD
        + "while True:\n"
        + _indented("torch.randn(4, 512)", 4)
    )
    options = CaptureOptions(profile=find_profile("rtx4090"))
    trace = capture_script(ScriptTarget("script", "train.py", ("--x",)), options)
    assert trace.meta.optimizer_steps == 3
    assert sys.modules["__main__"] is main


def _indented(batch: str, width: int) -> str:
    lines = [f"forward({batch}).backward()", "optimizer.step()", "optimizer.zero_grad()"]
    return "".join(" " * width + line + "\n" for line in lines)


def test_allocator_settings_of_the_script(tmp_path: Path) -> None:
    body = "torch.cuda.memory._set_allocator_settings('expandable_segments:True')\n"
    loop = "while True:\n" + _indented("torch.randn(4, 512)", 4)
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


def test_memory_that_grows_is_said(tmp_path: Path) -> None:
    body = """
kept = []
while True:
    kept.append(torch.zeros(1 << 20, device="cuda"))
    forward(torch.randn(4, 512)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    grown = [a for a in run(tmp_path, body).meta.assumptions if a.kind == "growth"]
    assert len(grown) == 1
    assert f"{4 << 20:,} bytes more" in grown[0].text


def test_an_optimizer_around_another_steps_once(tmp_path: Path) -> None:
    body = """
class Sharpness(torch.optim.Optimizer):
    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base
    def step(self, closure=None):
        self.base.step()

outer = Sharpness(optimizer)
while True:
    forward(torch.randn(4, 512)).backward()
    outer.step()
    optimizer.zero_grad()
"""
    assert run(tmp_path, body).meta.optimizer_steps == 3


def test_a_checkpoint_from_disk_is_loaded_onto_the_device(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(512, 512), "step": 7}, tmp_path / "old.pt")
    body = f"""
saved = torch.load({str(tmp_path / "old.pt")!r}, map_location="cuda")
assert saved["step"] == 7 and saved["weight"].is_cuda
model.load_state_dict(saved, strict=False)
while True:
    forward(torch.randn(4, 512)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert run(tmp_path, body).meta.optimizer_steps == 3


def test_a_padded_transformer_encoder(tmp_path: Path) -> None:
    body = """
layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2).cuda()
optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
padded = (torch.arange(16) > 9).expand(2, 16).cuda()
while True:
    encoder(torch.randn(2, 16, 64).cuda(), src_key_padding_mask=padded).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert run(tmp_path, body).meta.optimizer_steps == 3


def test_workers_that_outlive_their_epoch_do_not_keep_it_waiting(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = DataLoader(
        TensorDataset(torch.randn(256, 512)), batch_size=4, num_workers=1,
        persistent_workers=True, multiprocessing_context="spawn",
    )
    for epoch in range(100):
        for (batch,) in batches:
            model(batch.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
""")
    command = [sys.executable, "-m", "memplan", "estimate", "--json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_evaluation_is_seen_where_workers_outlive_their_epoch(tmp_path: Path) -> None:
    body = """
loaders = [
    DataLoader(TensorDataset(torch.randn(64 * size, 512)), size, num_workers=1,
               persistent_workers=True)
    for size in (4, 32)
]
with torch.no_grad():  # an evaluation before the training: its iterator is used again after it
    for (batch,) in loaders[1]:
        forward(batch[:1])
for epoch in range(10_000):
    for (batch,) in loaders[0]:
        forward(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for (batch,) in loaders[1]:
            forward(batch)
"""
    trace = run(tmp_path, body)
    assert trace.meta.optimizer_steps <= 4
    sizes = trace.events.bytes[trace.events.bytes > 0].tolist()
    assert sizes.count(32 * 512 * 4) >= 3


@pytest.mark.parametrize(
    ("handler", "line"),
    [
        ("except torch.cuda.OutOfMemoryError:", 18),
        ("except (ValueError, torch.OutOfMemoryError) as error:", 18),
        ("except RuntimeError as error:\n    assert 'out of memory' in str(error)", 19),
        ("except RuntimeError:  # not 'out of memory'", 0),
    ],
)
def test_a_handler_of_out_of_memory_is_said_not_to_be_exercised(
    tmp_path: Path, handler: str, line: int
) -> None:
    body = f"""
try:
    while True:
        forward(torch.randn(4, 512)).backward()
        optimizer.step()
        optimizer.zero_grad()
{handler}
    print("smaller batches")
"""
    said = [note for note in run(tmp_path, body).meta.notes if "not exercised" in note]
    assert [f"train.py:{line}: what" in note for note in said] == ([True] if line else [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--auto_find_batch_size", "True"), True),
        (("--auto-find-batch-size=true",), True),
        (("--auto_find_batch_size=False",), False),
        (("--batch_size", "8"), False),
    ],
)
def test_a_search_for_a_batch_size_may_be_asked_for_by_argument(
    tmp_path: Path, arguments: tuple[str, ...], said: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trains')\n")
    assert bool(oom_note(ScriptTarget("script", str(script), arguments))) == said


def test_a_loop_on_the_loss_ends_where_nothing_ends_the_job(tmp_path: Path) -> None:
    """`with memplan.capture():` runs the block to its end. The loop is in a file of its own: a loop
    is understood by its source, and this file may be edited while it runs."""
    script = tmp_path / "loop.py"
    script.write_text(
        """
import torch
steps = 0
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = torch.full((), 9.0).cuda() + torch.randn((), device="cuda")
while loss > 0.01:
    loss = model(torch.randn(4, 64).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
"""
    )
    options = CaptureOptions(profile=find_profile("rtx4090"))
    with CaptureSession(options, stop=False):
        steps = runpy.run_path(str(script))["steps"]
    assert steps == 3


TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(width):
    model = nn.Sequential(nn.Linear(512, width), nn.GELU(), nn.Linear(width, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for (batch,) in DataLoader(TensorDataset(torch.randn(256, 512)), batch_size=4):
        model(batch.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if {evaluate}:
        with torch.no_grad():
            for (batch,) in DataLoader(TensorDataset(torch.randn(64, 512)), batch_size=8):
                model(batch.cuda())
"""


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_larger_model_that_is_trained_afterwards_is_seen(tmp_path: Path, evaluate: bool) -> None:
    """As folds of a cross-validation, stages, a pretraining before the finetuning."""
    head = TRAINING.format(evaluate=evaluate)
    both = run(tmp_path, "for width in (512, 4096):\n    train(width)", head=head)
    larger = run(tmp_path, "train(4096)", head=head)
    assert simulate(both).requested_peak_bytes >= simulate(larger).requested_peak_bytes
    again = run(tmp_path, "for width in (4096, 512, 4096):\n    train(width)", head=head)
    assert again.meta.optimizer_steps <= 4


def test_trainings_without_end_are_said(tmp_path: Path) -> None:
    body = "for stage in range(1, 100):\n    train(2048 * stage)"
    trace = run(tmp_path, body, head=TRAINING.format(evaluate=False))
    (said,) = [item.text for item in trace.meta.assumptions if item.kind == "trainings"]
    assert "the job trained 8 times over" in said


COLLECTED = """
for (batch,) in loader:
    forward(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
outputs = []
with torch.no_grad():
    for (batch,) in DataLoader(TensorDataset(torch.randn(40 * 1024, 512)), batch_size=1024):
        outputs.append(model(batch.cuda()))
torch.cat(outputs)
"""


def test_predictions_that_are_collected_are_seen_to_the_end(tmp_path: Path) -> None:
    assert run(tmp_path, COLLECTED).events.bytes.max() == 40 * 1024 * 512 * 4
    freed = COLLECTED.replace("(model(batch.cuda()))", "(model(batch.cuda()).cpu())")
    assert (run(tmp_path, freed).events.bytes == 1024 * 512 * 4).sum() < 20


def test_predictions_that_are_not_all_seen_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplan.capturing.training.ending._SECONDS_AFTER", 0.0)
    monkeypatch.setattr("memplan.capturing.training.ending.Ending._watch_time", _after_five_batches)
    trace = run(tmp_path, COLLECTED)
    (said,) = [item.text for item in trace.meta.assumptions if item.kind == "growth"]
    assert "leaves 2,097,152 bytes behind" in said


def _after_five_batches(ending: Ending) -> None:
    if max(ending._batches.values(), default=0) > 5:
        ending.stop()


def test_parameters_without_a_gradient_are_said(tmp_path: Path) -> None:
    body = (
        """
other = nn.Linear(512, 1024).cuda()
optimizer.add_param_group({"params": other.parameters()})
"""
        + EPOCHS
    )
    said = [item.text for item in run(tmp_path, body).meta.assumptions if item.kind == "optimizer"]
    assert [
        "2 parameters of the optimizer (2,101,248 bytes) had no gradient" in it for it in said
    ] == [True]


def test_a_loader_of_larger_batches_that_was_not_read_is_said(tmp_path: Path) -> None:
    body = "other = DataLoader(TensorDataset(torch.randn(512, 512)), batch_size={size})\n" + EPOCHS
    for size, times in ((4096, 1), (4, 0)):
        once = body.replace("{size}", str(size)).replace("range(10)", "range(1)")
        notes = run(tmp_path, once).meta.notes
        assert sum("batches of 4,096 was made and not read" in note for note in notes) == times
