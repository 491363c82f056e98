"""What a training step is fed, as a capture sees it: batches, and their samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.types.trace import TraceMeta
from tests.capturing.training.scripts import indented, run

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Stream(IterableDataset):
    def __init__(self, shape):
        self.shape = shape
    def __iter__(self):
        for _ in range(64):
            yield torch.ones(self.shape)

DATA = TensorDataset(torch.ones(60, 8))
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def forward(batch):
    batch = batch if torch.is_tensor(batch) else batch[0]
    return model(batch.cuda()).square().mean()

def accumulated(batches, parts):
    for number, batch in enumerate(batches, 1):
        forward(batch).backward()
        if number % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
EPOCHS = """
for _ in range(9):
    for (batch,) in DataLoader(DATA, batch_size={}, shuffle=True, num_workers={}):
{}
    for (batch,) in DataLoader(TensorDataset(torch.ones(90, 8)), batch_size=30):
        with torch.no_grad():
            forward(batch)
"""
EVALUATING = """
def evaluate():
    with torch.no_grad():
        for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(90, 8)), 10)):
            forward(batch)
            if number == 2:
                break

def train(batch):
    forward(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AHEAD = """
loader = iter(DataLoader(DATA, batch_size=4, drop_last=True))
following = next(loader).__getitem__(0)
for (batch,) in loader:
{}
    following = batch
"""


def seen(tmp_path: Path, body: str) -> tuple[float | None, float | None]:
    meta: TraceMeta = run(tmp_path, body, head=HEAD).meta
    return meta.batches_per_step, meta.samples_per_step


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batch_size", "samples"), [(8, 8), (60, 60), (500, 60)])
def test_samples_are_those_that_the_loader_takes(
    tmp_path: Path, workers: int, batch_size: int, samples: int
) -> None:
    """Not more than there are, and none of those that are evaluated."""
    body = EPOCHS.format(batch_size, workers, indented("batch", 8))
    assert seen(tmp_path, body) == (1, samples)


def test_a_loader_that_is_read_one_batch_ahead(tmp_path: Path) -> None:
    assert seen(tmp_path, AHEAD.format(indented("following", 4))) == (1, 4)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ("(batch for _ in range(9) for (batch,) in DataLoader(DATA, batch_size=5))", (3, 15)),
        ("DataLoader(Stream((8,)), batch_size=5)", (3, 15)),
        ("DataLoader(Stream((5, 8)), batch_size=None)", (3, None)),
        ("(torch.ones(5, 8) for _ in range(30))", (3, None)),
        ("(torch.ones(5, 8, device='cuda') for _ in range(30))", (None, None)),
    ],
)
def test_batches_that_a_step_accumulates(
    tmp_path: Path, batches: str, expected: tuple[float, float | None]
) -> None:
    assert seen(tmp_path, f"accumulated({batches}, 3)") == expected


def test_several_losses_of_a_batch_are_no_more_batches(tmp_path: Path) -> None:
    body = """
for _ in range(9):
    batch = torch.ones(4, 8).cuda()
    forward(batch).backward()
    forward(batch + torch.randn(4, 8, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert seen(tmp_path, body) == (1, None)


@pytest.mark.parametrize(
    ("loop", "samples"),
    [
        ("for (batch,) in DataLoader(DATA, 4): evaluate(); train(batch)", 4),
        ("for (batch,) in DataLoader(DATA, 4): train(batch); evaluate()", 4),
        ("for batch in [torch.ones(4, 8)] * 30: train(batch); evaluate()", None),
    ],
)
def test_an_evaluation_that_breaks_off_is_not_trained_on(
    tmp_path: Path, loop: str, samples: int | None
) -> None:
    assert seen(tmp_path, EVALUATING + loop) == (1, samples)


@pytest.mark.parametrize("data", ["DATA", "Stream((8,))"])
def test_batches_that_are_read_before_their_backward_passes(tmp_path: Path, data: str) -> None:
    body = f"""
loader = iter(DataLoader({data}, 5))
for _ in range(6):
    accumulated([next(loader), next(loader)], 2)
"""
    assert seen(tmp_path, body) == (2, 10)


def test_batches_of_different_sizes(tmp_path: Path) -> None:
    sizes = "[list(range(size)) for size in (2, 4, 9)] * 9"
    batches = f"(batch for (batch,) in DataLoader(DATA, batch_sampler={sizes}))"
    assert seen(tmp_path, f"accumulated({batches}, 1)") == (1, 5)


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        ("DataLoader(DATA, 60)", 60),
        ("DataLoader(DATA, 30)", None),  # the first step reads both
        ("DataLoader(Stream((8,)), 500)", None),
    ],
)
def test_short_epochs_that_are_read_to_their_end_first(
    tmp_path: Path, loader: str, samples: int | None
) -> None:
    body = f"""
def ahead(batches):
    now = next(batches)
    for following in batches:
        yield now
        now = following
    yield now

for _ in range(9):
    accumulated(ahead(iter({loader})), 1)
"""
    assert seen(tmp_path, body) == (1, samples)


def test_batches_for_other_ranks(tmp_path: Path) -> None:
    """One rank reads for all, as Accelerate's `dispatch_batches` does."""
    body = """
torch.distributed.init_process_group(
    "nccl", store=torch.distributed.HashStore(), rank=0, world_size=2
)
loader = iter(DataLoader(DATA, 5))
accumulated((torch.cat([next(loader)[0], next(loader)[0]])[:5] for _ in range(6)), 1)
"""
    assert seen(tmp_path, body) == (1, None)
