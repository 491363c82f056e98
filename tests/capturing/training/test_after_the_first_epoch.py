"""What is seen after the steps that repeat, and what is said not to be."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from memplan.capturing.job.oom_handlers import oom_note
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.session import CaptureSession
from memplan.capturing.training.ending import Ending
from memplan.simulate import simulate
from memplan.types.device import find_profile
from memplan.types.trace import Phase, Role, Trace
from tests import warm
from tests.capturing.training.scripts import EPOCHS, HEAD, indented, run


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
    done = warm.memplan(tmp_path, "estimate", "--json", "train.py")
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


TRAINS = """
    for (batch,) in DataLoader(loader.dataset, batch_size=4):
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
"""
ON_ALL = """
with torch.no_grad():
    model(torch.randn(32 * 1024, 512).cuda())
"""


@pytest.mark.parametrize(
    ("loop", "seen"),
    [
        ("for epoch in range(100):", True),
        ("for epoch in range(100):\n    loss = None", False),
        ("while step < 1000:", True),
    ],
)
def test_what_follows_the_last_epoch(tmp_path: Path, loop: str, seen: bool) -> None:
    """Epochs that are like the one before run without batches, and may fail of it."""
    fails = "    loss.item()\n" if "None" in loop else ""
    trace = run(tmp_path, f"step = 0\n{loop}{TRAINS}{fails}{ON_ALL}")
    assert (32 * 1024 * 512 * 4 in trace.events.bytes) == seen
    assert any("does after the training" in note for note in trace.meta.notes) != seen
    assert trace.meta.optimizer_steps == 4
    assert not any(said.kind == "ending" for said in trace.meta.assumptions)


def test_what_follows_epochs_of_a_loader_that_fetches_ahead(tmp_path: Path) -> None:
    """As Accelerate's do, to know the last batch when they give it out."""
    body = f"""
def ahead(loader):
    reading = iter(loader)
    held = next(reading, None)
    for batch in reading:
        yield held
        held = batch
    if held is not None:
        yield held

for epoch in range(100):
    for (batch,) in ahead(loader):
        forward(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if (epoch + 1) % 10 == 0:
        with torch.no_grad():
            forward(torch.randn(1024, 512))
{ON_ALL}"""
    trace = run(tmp_path, body)
    assert 32 * 1024 * 512 * 4 in trace.events.bytes
    assert _largest(trace, Phase.EVALUATION) >= 1024 * 512 * 4


def test_what_follows_epochs_of_loaders_that_are_made_anew(tmp_path: Path) -> None:
    """As Keras does, each with a dataset of a class of its own."""
    body = f"""
def loaded():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, number):
            return (torch.ones(512),)
    return DataLoader(Rows(), batch_size=4)

for epoch in range(100):
    for (batch,) in loaded():
        forward(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
{ON_ALL}"""
    assert 32 * 1024 * 512 * 4 in run(tmp_path, body).events.bytes


@pytest.mark.parametrize("workers", [0, 1])
def test_what_follows_epochs_of_a_loader_that_is_none_of_pytorchs(
    tmp_path: Path, workers: int
) -> None:
    """As fastai's, whose iterators are PyTorch's. Its optimizers are not, either."""
    body = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, dataloader

class Other:
    def __init__(self):
        rows = TensorDataset(torch.randn(4096, 512))
        self.loader = DataLoader(rows, batch_size=4, num_workers={workers})
    def __getattr__(self, name):
        return getattr(self.loader, name)
    def __iter__(self):
        if {workers}:
            return dataloader._MultiProcessingDataLoaderIter(self)
        return dataloader._SingleProcessDataLoaderIter(self)

other = Other()
model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).cuda()
model[0].requires_grad_(False)

def fit(epochs):
    for epoch in range(epochs):
        for (batch,) in other:
            model(batch.cuda()).square().mean().backward()
            with torch.no_grad():
                for one in model.parameters():
                    if one.grad is not None:
                        one -= 0.1 * one.grad
                        one.grad = None

fit(50)
model.requires_grad_(True)
fit(50)
{ON_ALL}"""
    trace = run(tmp_path, body, head="")
    assert 32 * 1024 * 512 * 4 in trace.events.bytes
    grown = trace.events.bytes[trace.events.phase == Phase.BACKWARD].tolist()
    assert grown.count(512 * 1024 * 4) >= 3 + 2 * 3, "the second training, of more layers"


def test_an_evaluation_tried_before_the_training_is_no_training(tmp_path: Path) -> None:
    """As Lightning does: it has its batches in all later epochs."""
    body = f"""
scores = DataLoader(loader.dataset, batch_size=64)
step = 0
@torch.no_grad()
def evaluate(most):
    global reading
    reading = iter(scores)
    torch.cat([model(batch.cuda()) for (batch,), _ in zip(reading, range(most))])
evaluate(2)
for epoch in range(4):{TRAINS}    evaluate(100)
print(torch.zeros(3 << 20, device="cuda").shape)
"""
    assert 12 << 20 in run(tmp_path, body).events.bytes


def test_a_larger_model_on_the_same_loader_is_seen(tmp_path: Path) -> None:
    """Stages by one function: the second is no later epoch of the first."""
    body = """
def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(5):
        for (batch,) in loader:
            model(batch.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

train(model)
train(nn.Linear(512, 4096).cuda())
"""
    states = run(tmp_path, body).storages.role == Role.OPTIMIZER_STATE
    assert states.sum() >= 8, "two of each weight and bias"


GROWS = """
def stage(width):
    loader = DataLoader(TensorDataset(torch.randn(64, width)), batch_size=4)
    for epoch in range({epochs}):
        for (batch,) in loader:
            forward(batch.view(-1, 512)).backward()
            optimizer.step()
            optimizer.zero_grad()

for width in ({widths}):
    stage(width)
"""


@pytest.mark.parametrize("epochs", [1, 3])
def test_samples_that_grow_from_stage_to_stage_are_seen(tmp_path: Path, epochs: int) -> None:
    """As images of more pixels, in as many batches of as many."""
    trace = run(tmp_path, GROWS.format(epochs=epochs, widths="512, 1 << 19, 1 << 20"))
    assert 4 * 4 << 20 in trace.events.bytes, "the largest batch"
    shrinks = run(tmp_path, GROWS.format(epochs=epochs, widths="1 << 20, 1 << 19, 512"))
    assert shrinks.meta.optimizer_steps <= 5


def test_samples_of_the_same_loader_that_grow_are_seen(tmp_path: Path) -> None:
    body = """
class Images(torch.utils.data.Dataset):
    size = 512
    def __len__(self):
        return 64
    def __getitem__(self, number):
        return torch.ones(self.size)

images = Images()
loader = DataLoader(images, batch_size=4)
for epoch in range(20):
    images.size = 1 << 19 if epoch > 14 else 512
    for batch in loader:
        forward(batch.view(-1, 512)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    assert 4 * 4 << 19 in run(tmp_path, body).events.bytes


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
    sampled = "loader = DataLoader(loader.dataset, batch_sampler=[[0, 1]] * 512)\n" + body
    for text, size, times in ((body, 4096, 1), (body, 4, 0), (sampled, 4096, 0)):
        once = text.replace("{size}", str(size)).replace("range(10)", "range(1)")
        notes = run(tmp_path, once).meta.notes
        assert sum("batches of 4,096 was made and not read" in note for note in notes) == times


def _largest(trace: Trace, phase: Phase) -> int:
    return int(trace.events.bytes[trace.events.phase == phase].max())


@pytest.mark.parametrize(
    "loop", ["for number in range(5000):", "for number, _ in enumerate(DataLoader(range(5000))):"]
)
def test_an_evaluation_every_so_many_steps_is_seen(tmp_path: Path, loop: str) -> None:
    body = f"""
{loop}
{indented("torch.randn(4, 512)", 4)}
    if number % 1000 == 999:
        with torch.no_grad():
            forward(torch.randn(1024, 512))
"""
    assert _largest(run(tmp_path, body), Phase.EVALUATION) == 4 * 1024 * 512


def test_layers_that_are_unfrozen_in_a_later_epoch_are_seen(tmp_path: Path) -> None:
    body = f"""
trunk = nn.Linear(512, 512).cuda().requires_grad_(False)
optimizer = torch.optim.SGD([*trunk.parameters(), *model.parameters()], 0.1)
for epoch in range(9):
    if epoch == 5:
        trunk.requires_grad_(True)
    for (batch,) in loader:
{indented("trunk(batch.cuda())", 8)}
"""
    trace = run(tmp_path, body)
    of_gradients = trace.storages.role[trace.events.storage] == Role.GRADIENT
    steps = trace.events.step[of_gradients & (trace.events.bytes == 4 * 512 * 512)]
    assert np.bincount(steps).max() == 2 * 2, "two are allocated, and released"
    assert trace.meta.optimizer_steps <= 4 + 4


def test_conditions_on_later_steps_are_said(tmp_path: Path) -> None:
    body = f"""
for number in range(5000):
    batch = torch.randn(4 if number < 3000 else 8, 512)
{indented("batch", 4)}
"""
    (said,) = [one for one in run(tmp_path, body).meta.notes if "may do other things" in one]
    assert "not seen: number < 3000 (" in said and said.endswith(
        f"train.py:{HEAD.count(chr(10)) + 3})"
    )


def test_a_loop_that_keeps_graphs_is_seen_to_its_end(tmp_path: Path) -> None:
    body = f"""
for (batch,) in loader:
{indented("batch", 4)}
total = 0
for (batch,) in DataLoader(TensorDataset(torch.randn(32 * 1024, 512)), batch_size=1024):
    total = total + forward(batch)
"""
    trace = run(tmp_path, body)
    kept = 4 * 1024 * 512
    after = trace.events.step == trace.meta.optimizer_steps
    assert ((trace.events.bytes == kept) & after).sum() >= 32
    assert "what the script does after" not in " ".join(trace.meta.notes)


def test_many_calls_of_modules_may_be_one_forward_pass(tmp_path: Path) -> None:
    body = f"""
layers = [nn.Linear(512, 512).cuda() for _ in range(20)]
def forward(batch):
    batch = batch.cuda()
    for layer in layers:
        batch = layer(batch)
    return batch.square().mean()
for number in range(100):
{indented("torch.randn(4, 512)", 4)}
forward(torch.randn(1024, 512))
with torch.no_grad():
    forward(torch.randn(2048, 512))
"""
    assert _largest(run(tmp_path, body), Phase.EVALUATION) == 4 * 2048 * 512


@pytest.mark.parametrize("keeps", [True, False])
def test_models_of_all_folds_that_are_kept(tmp_path: Path, keeps: bool) -> None:
    body = f"""
kept = []
for fold in range(4):
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(3):
        for (batch,) in loader:
{indented("batch", 12)}
    kept.append((model, optimizer) if {keeps} else None)
with torch.no_grad():
    forward(torch.randn(4096, 512))
"""
    trace = run(tmp_path, body)
    states = trace.storages.role[trace.events.storage] == Role.OPTIMIZER_STATE
    made = (states & (trace.events.bytes == 4 * 512 * 512)).sum()
    assert made >= (4 if keeps else 1)
    assert _largest(trace, Phase.EVALUATION) == 4 * 4096 * 512
    assert trace.meta.optimizer_steps <= (4 * (3 + 3) if keeps else 3 + 3 + 3)
