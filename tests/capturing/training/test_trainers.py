"""Training loops of packages: what they do only now and then is seen as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Role, Trace

TRAINER = """
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

class Rows(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return {"x": torch.randn(256), "labels": torch.zeros(1)}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean(), "logits": x}

arguments = TrainingArguments(
    "out", report_to=[], per_device_train_batch_size=2, per_device_eval_batch_size=64,
    eval_strategy="steps", eval_steps=50, save_strategy="steps", save_steps=50, logging_steps=50,
    disable_tqdm=True,
)
Trainer(Model(), arguments, train_dataset=Rows(), eval_dataset=Rows()).train()
"""


def run(tmp_path: Path, program: str) -> Trace:
    script = tmp_path / "train.py"
    script.write_text(program)
    options = CaptureOptions(profile=find_profile("rtx4090"))
    return capture_script(ScriptTarget("script", str(script)), options)


def rows_of_inputs(trace: Trace) -> set[int]:
    """Sizes of the batches that were moved to the device."""
    return {
        event.bytes // (4 * 256)
        for event in trace
        if event.kind == EventKind.ALLOC
        and trace.storages.role[event.storage] == Role.INPUT
        and event.bytes >= 4 * 256
    }


def test_a_trainer_evaluates_though_it_never_gets_there(tmp_path: Path) -> None:
    """Evaluations every 50 steps are seen where three steps are enough."""
    pytest.importorskip("accelerate")
    trace = run(tmp_path, TRAINER)
    assert trace.meta.optimizer_steps == 3
    assert rows_of_inputs(trace) == {2, 64}
    assert not any("evaluation" in note for note in trace.meta.notes)


LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, index):
        self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

rows = [torch.randn(256) for _ in range(400)]
trainer = Trainer(
    accelerator="gpu", devices=1, num_sanity_val_steps=0, check_val_every_n_epoch=5, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(rows, 2), DataLoader(rows, 64))
"""


@pytest.mark.filterwarnings("ignore")  # xdist would import Lightning where torchvision cannot be
def test_lightning_evaluates_after_an_epoch_that_was_cut_short(tmp_path: Path) -> None:
    """It counts the batches to its evaluation beforehand: here 200, five times over."""
    pytest.importorskip("lightning")
    trace = run(tmp_path, LIGHTNING)
    assert trace.meta.optimizer_steps < 5
    assert rows_of_inputs(trace) == {2, 64}


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = torch.nn.Linear(256, 256)
rows = [torch.randn(256) for _ in range(400)]
model, optimizer, batches, others = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(rows, 2), DataLoader(rows, 64)
)
for epoch in range(3):
    for x in batches:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for x in others:
            model(x)
"""


def test_a_loader_that_looks_a_batch_ahead_does_not_hide_the_evaluation(tmp_path: Path) -> None:
    """Accelerate's loaders have one batch in hand when they run dry: it is trained on."""
    pytest.importorskip("accelerate")
    trace = run(tmp_path, ACCELERATE)
    assert trace.meta.optimizer_steps == 6  # and two of the next epoch, one of them in hand
    assert rows_of_inputs(trace) == {2, 64}
