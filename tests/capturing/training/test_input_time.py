"""What a data loader takes for a batch: the loader's own time, at full speed, and no more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.capturing.training import input_time
from memplan.types.trace import Trace
from tests.capturing.training.scripts import indented, run

HEAD = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((512,), float(index))

class Stream(IterableDataset):
    def __iter__(self):
        for index in range(64):
            time.sleep(0.005)
            yield torch.full((512,), float(index))

class OnTheCard(Slow):
    def __getitem__(self, index):
        return torch.full((512,), 1.0).cuda()

model = nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def forward(batch):
    return model(batch.cuda()).square().mean()
"""
LOOP = "for batch in DataLoader({}, batch_size=4, num_workers={}):\n" + indented("batch", 4)


def captured(tmp_path: Path, body: str) -> Trace:
    return run(tmp_path, body, head=HEAD)


@pytest.mark.parametrize(("dataset", "workers"), [("Slow()", 0), ("Slow()", 2), ("Stream()", 0)])
def test_a_batch_takes_what_its_samples_take(tmp_path: Path, dataset: str, workers: int) -> None:
    (found,) = captured(tmp_path, LOOP.format(dataset, workers)).meta.inputs
    assert found.workers == workers and found.batches == 1
    assert found.batch_seconds >= 0.02, "four samples sleep that long"


def test_batches_are_counted_by_step(tmp_path: Path) -> None:
    body = """
loader = DataLoader(Slow(), batch_size=2)
for number, batch in enumerate(loader):
    forward(batch).backward()
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
"""
    (found,) = captured(tmp_path, body).meta.inputs
    assert found.batches == 3


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(9):\n" + indented("torch.randn(4, 512)", 4),
        LOOP.format("OnTheCard()", 0),
        LOOP.format("Stream()", 2),
    ],
)
def test_nothing_is_told_of_what_cannot_be_measured(tmp_path: Path, body: str) -> None:
    assert captured(tmp_path, body).meta.inputs == []


def test_the_script_never_sees_what_is_fetched_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
seen, given = [], 0
class Noted(Slow):
    def __getitem__(self, index):
        seen.append(index)
        return super().__getitem__(index)

for batch in DataLoader(Noted(), batch_size=4):
    given += 1
    forward(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
print("beside", len(seen) - 4 * given)
"""
    assert captured(tmp_path, body).meta.inputs
    assert "beside 0\n" in capsys.readouterr().out


def test_a_dataset_on_the_card_is_freed_when_the_script_drops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
from torch.utils.data import TensorDataset

data = TensorDataset(torch.ones(256, 512, device="cuda"))
reading = iter(DataLoader(data, batch_size=4))
batch, held = next(reading), torch.cuda.memory_allocated()
del data, reading, batch
print("freed", held - torch.cuda.memory_allocated() >= 256 * 512 * 4)
"""
    captured(tmp_path, body + LOOP.format("Slow()", 0))
    assert "freed True\n" in capsys.readouterr().out


def test_a_dataset_that_waits_for_the_job_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_time, "_MOST_SECONDS", 0.2)
    body = """
import threading
is_training = threading.Event()

class Fed(Slow):
    def __getitem__(self, index):
        is_training.wait()
        return super().__getitem__(index)

is_training.set()
"""
    ended = "is_training.clear()\n"
    assert captured(tmp_path, body + LOOP.format("Fed()", 0) + ended).meta.inputs == []
