"""What follows a training whose reader opens its loader again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile
from memplan.types.trace import Phase, Trace
from tests.capturing.training.scripts import HEAD, run

READERS = """
import itertools

def endless(loader):
    while True:
        for batch in loader:
            yield batch

def of_epochs(loader):
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader

def step(batch):
    forward(batch[0]).backward(); optimizer.step(); optimizer.zero_grad()

class Loader(DataLoader):
    def set_epoch(self, epoch):
        pass

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield (torch.randn(512),)

class Restarting:
    def __init__(self, loader):
        self.loader, self.reading = loader, iter(loader)
    def get(self):
        try:
            return next(self.reading)
        except StopIteration:
            self.reading = iter(self.loader)
            return next(self.reading)
"""
ON_ALL = """
with torch.no_grad():
    forward(torch.randn(8192, 512))
"""


def largest(trace: Trace, phase: Phase) -> int:
    return int(trace.events.bytes[trace.events.phase == phase].max())


@pytest.mark.parametrize(
    "loop",
    [
        "reader = endless(loader)\nfor number in range(10_000):\n    step(next(reader))",
        "reader = itertools.cycle(loader)\nnumber = 0\n"
        "while number < 10_000:\n    step(next(reader))\n    number += 1",
        "for number, batch in enumerate(endless(loader)):\n"
        "    if number >= 10_000: break\n    step(batch)",
        "reader = of_epochs(Loader(loader.dataset, batch_size=4))\n"
        "while True:\n    step(next(reader))\n    number += 1\n    if number > 10_000: break",
        "reader = Restarting(loader)\nfor number in range(10_000):\n    step(reader.get())",
        "reader = iter(DataLoader(Endless(), batch_size=4))\n"
        "for number in range(10_000):\n    step(next(reader))",
        "while number < 10_000:\n    for batch in loader:\n        step(batch)\n"
        "        number += 1\n        if number == 10_000: break",
        "one = endless(DataLoader(torch.utils.data.Subset(loader.dataset, range(4)), 4))\n"
        "for number in range(10_000):\n    step(next(one))",
    ],
    ids=["next", "cycle", "for", "epochs", "again", "stream", "while", "one batch"],
)
def test_an_evaluation_is_seen(tmp_path: Path, loop: str) -> None:
    trace = run(tmp_path, f"{READERS}number = 0\n{loop}\n{ON_ALL}")
    assert largest(trace, Phase.EVALUATION) == 4 * 8192 * 512
    assert trace.meta.optimizer_steps <= 3 + 3
    assert not any("does after the training" in note for note in trace.meta.notes)


def test_steps_of_many_micro_batches(tmp_path: Path) -> None:
    body = f"""{READERS}
reader = endless(loader)
for number in range(1000):
    for part in range(40):
        forward(next(reader)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert largest(run(tmp_path, body + ON_ALL), Phase.EVALUATION) == 4 * 8192 * 512


def test_several_steps_of_a_critic_for_one_of_a_generator(tmp_path: Path) -> None:
    body = f"""{READERS}
other = nn.Linear(512, 512).cuda()
of_other = torch.optim.SGD(other.parameters(), 0.1)
reader, third = endless(loader), endless(DataLoader(loader.dataset, batch_size=8))
for number in range(1000):
    for turn in range(2):
        step(next(reader))
    model(other(next(third)[0].cuda())).sum().backward()
    of_other.step()
    of_other.zero_grad()
"""
    assert largest(run(tmp_path, body + ON_ALL), Phase.EVALUATION) == 4 * 8192 * 512


def test_epochs_of_so_many_steps(tmp_path: Path) -> None:
    body = f"""{READERS}
reader = endless(loader)
for epoch in range(50):
    for batch in itertools.islice(reader, 200):
        step(batch)
    with torch.no_grad():
        forward(torch.randn(1024, 512))
"""
    assert largest(run(tmp_path, body + ON_ALL), Phase.EVALUATION) == 4 * 8192 * 512


def test_a_larger_training_by_the_same_reader_is_followed(tmp_path: Path) -> None:
    body = f"""{READERS}
def train(rows):
    reader = endless(DataLoader(loader.dataset, batch_size=rows))
    for number in range(1000):
        step(next(reader))
for rows in (4, 8, 2048):
    train(rows)
"""
    trace = run(tmp_path, body)
    assert 4 * 2048 * 512 in trace.events.bytes
    assert trace.meta.optimizer_steps <= 3 + 3 + 3 + 3


def test_a_loop_that_ends_with_its_loader_is_left_to_it(tmp_path: Path) -> None:
    """As where a batch is fetched ahead: the epochs to come run without batches."""
    body = f"""{READERS}
class Ahead:
    def __init__(self, loader):
        self.reading = iter(loader)
    def get(self):
        try:
            return next(self.reading)
        except StopIteration:
            return None

for epoch in range(30):
    ahead = Ahead(loader)
    batch = ahead.get()
    while batch is not None:
        step(batch)
        batch = ahead.get()
assert epoch == 29
"""
    trace = run(tmp_path, body + ON_ALL)
    assert largest(trace, Phase.EVALUATION) == 4 * 8192 * 512
    assert not trace.meta.assumptions


def test_batches_of_all_lengths_are_read_ahead(tmp_path: Path) -> None:
    body = f"""{READERS}
lengths = [torch.randn(1 + number * 37 % 64, 512) for number in range(64)]
reader = endless(DataLoader(lengths, batch_size=1))
for number in range(10_000):
    step(next(reader))
"""
    script = tmp_path / "train.py"
    script.write_text(HEAD + body + ON_ALL)
    options = CaptureOptions(profile=find_profile("rtx4090"), scan_seconds=60.0)
    trace = capture_script(ScriptTarget("script", str(script)), options)
    assert 4 * 64 * 512 in trace.events.bytes
    assert largest(trace, Phase.EVALUATION) == 4 * 8192 * 512
    assert any("all 64 batches of the data loader were read" in note for note in trace.meta.notes)
