"""Batches of different sizes: the loader is read ahead, and the whole epoch is simulated."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from memplan.capturing.training.scan import LoaderScan
from memplan.estimation import estimate
from memplan.simulate import AllocatorSettings, settled, simulate
from memplan.types.trace import Trace
from tests.capturing.jobs import record

BATCHES = 40
LONG_ENOUGH = 600.0


class Texts(Dataset[torch.Tensor]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 4000, (self.lengths[index],))


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def ragged(seed: int, count: int = 8 * BATCHES) -> list[int]:
    draw = random.Random(seed)
    return [min(16 + int(draw.expovariate(1 / 90)), 700) for _ in range(count)]


def fetched_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    """As Accelerate does, to know the last batch when it gives it out."""
    reading = iter(loader)
    held = next(reading)
    for batch in reading:
        yield held
        held = batch
    yield held


def job(
    lengths: list[int],
    workers: int = 0,
    accumulation: int = 1,
    given: Callable[[DataLoader[Any]], Iterator[Any]] = iter,
    seed: int = 1,
) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(seed)
        loader = DataLoader(Texts(lengths), 8, shuffle=True, collate_fn=padded, num_workers=workers)
        model = nn.Sequential(nn.Embedding(4000, 256), nn.Linear(256, 4000)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for number, batch in enumerate(given(loader), 1):
            tokens = batch.cuda()
            logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()

    return run


def peaks(trace: Trace) -> tuple[int, int, int]:
    timeline = simulate(settled(trace, AllocatorSettings()).trace)
    return (
        timeline.reserved_peak_bytes,
        timeline.allocated_peak_bytes,
        timeline.requested_peak_bytes,
    )


@pytest.mark.parametrize("given", [iter, fetched_ahead])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_is_foretold_to_the_byte(
    given: Callable[[DataLoader[Any]], Iterator[Any]], workers: int
) -> None:
    run = job(ragged(1), workers, given=given)
    foretold, complete = record(run, scan_seconds=LONG_ENOUGH), record(run, steps=BATCHES)
    assert foretold.meta.optimizer_steps < 16 < complete.meta.optimizer_steps
    (run_of_batches,) = foretold.meta.batches
    assert run_of_batches.complete and len(run_of_batches.bytes) == BATCHES
    assert peaks(foretold) == peaks(complete)
    # Sizes that are not reused fragment: the steps that were captured do not show it.
    assert peaks(foretold)[0] > simulate(foretold).reserved_peak_bytes


@pytest.mark.parametrize("given", [iter, fetched_ahead])
def test_several_batches_of_a_step(given: Callable[[DataLoader[Any]], Iterator[Any]]) -> None:
    run = job(ragged(2), accumulation=2, given=given)
    foretold, complete = record(run, scan_seconds=LONG_ENOUGH), record(run, steps=BATCHES // 2)
    assert foretold.meta.batches[0].each == 2
    assert peaks(foretold) == peaks(complete)


def attending(lengths: list[int]) -> Callable[[], None]:
    """Attention pads its mask to a multiple of 8, and only where it is none."""

    def run() -> None:
        torch.manual_seed(1)
        loader = DataLoader(Texts(lengths), 8, shuffle=True, collate_fn=padded)
        model = nn.Embedding(4000, 256).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for batch in loader:
            count, length = batch.shape
            heads = model(batch.cuda()).view(count, length, 4, 64).transpose(1, 2)
            mask = torch.zeros(1, 4, length, length, device="cuda", requires_grad=True)
            mask = mask.expand(count, 4, length, length) * 1
            nn.functional.scaled_dot_product_attention(heads, heads, heads, mask).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def test_what_is_padded_to_a_multiple() -> None:
    run = attending([min(one, 300) for one in ragged(11, 8 * 80)])
    foretold, complete = record(run, scan_seconds=LONG_ENOUGH), record(run, steps=80)
    # The seed of attention on a card is a tensor on the host: nothing is drawn there.
    assert not foretold.meta.batches[0].drawn
    found, true = peaks(foretold), peaks(complete)
    assert found[2] == true[2]
    # Where no captured length is a multiple of 8 and none of 16, lengths like that are padded, too.
    for size, real in zip(found[:2], true[:2], strict=True):
        assert real <= size <= 1.01 * real


def test_the_answer_says_what_was_read() -> None:
    found = estimate(record(job(ragged(1)), scan_seconds=LONG_ENOUGH))
    (said,) = (note for note in found.notes if "were read, without the model" in note)
    assert said.startswith(f"all {BATCHES} batches of the data loader")
    assert any("made up from those captured" in note for note in found.notes)
    assert not any(one.kind == "steady-step" for one in found.assumptions)


def initialised() -> torch.Tensor:
    """The generator's state behind a model's initialisers."""
    torch.manual_seed(1)
    linear = nn.Linear(300, 301)
    nn.Sequential(nn.Conv2d(3, 5, 3), nn.Embedding(7, 2), nn.LSTM(3, 3))
    nn.init.trunc_normal_(linear.weight)
    nn.init.normal_(nn.Linear(31, 7).weight.t())
    nn.init.orthogonal_(nn.Linear(9, 9).weight)
    nn.Parameter(torch.empty(33)).data.bernoulli_(0.5)
    nn.Parameter(torch.empty(400, 400)).data.normal_()
    return torch.get_rng_state()


@pytest.mark.parametrize("options", [{"scan_seconds": LONG_ENOUGH}, {"steps": 3}])
def test_initialisers_leave_the_generator_as_they_do_for_real(options: dict[str, Any]) -> None:
    states = []

    def run() -> None:
        states.append(initialised())
        job(ragged(1, 8 * 8))()

    record(run, **options)
    assert torch.equal(states[0], initialised())


def test_an_order_that_hangs_on_numbers_not_drawn_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memplan.capturing.training.host_draws._MOST", 1 << 10)
    found = estimate(record(job(ragged(1)), scan_seconds=LONG_ENOUGH))
    assert any("no seed fixes the order" in note for note in found.notes)


def test_orders_that_no_seed_fixes_are_spanned() -> None:
    """As PyTorch seeds itself: with more bits than a script's seeds have."""
    lengths = ragged(1)
    found = estimate(record(job(lengths, seed=1 << 40), scan_seconds=LONG_ENOUGH))
    true = [peaks(record(job(lengths, seed=n), steps=BATCHES))[0] for n in (2, 3, 4)]
    assert len(set(true)) == 3
    for one in true:
        assert one <= found.reserved_peak_bytes
        assert found.reserved_low_bytes * 0.8 <= one  # batches of other texts, too
    assert any("no seed fixes the order" in note for note in found.notes)
    fixed = estimate(record(job(lengths), scan_seconds=LONG_ENOUGH))
    assert not any("no seed" in note for note in fixed.notes)


def test_batches_alike_are_left_alone() -> None:
    run = job([64] * 8 * BATCHES)
    ahead, plain = record(run, scan_seconds=LONG_ENOUGH), record(run)
    assert not ahead.meta.batches and len(ahead) == len(plain)
    assert any(
        f"all {BATCHES} batches of the data loader have" in note for note in ahead.meta.notes
    )


def test_reading_ahead_leaves_the_job_as_it_is(tmp_path: Path) -> None:
    """Its random numbers, and where it reads its open files."""
    path = tmp_path / "lengths"
    path.write_text("".join(f"{length}\n" for length in ragged(3)))

    class Lines(IterableDataset[torch.Tensor]):
        def __init__(self) -> None:
            self.file = path.open("rb", buffering=0)

        def __iter__(self) -> Iterator[torch.Tensor]:
            while line := self.file.readline():
                yield torch.randint(0, 100, (int(line),))

    def values(**how: Any) -> list[tuple[int, ...]]:
        seen = []

        def run() -> None:
            torch.manual_seed(0)
            model = nn.Embedding(100, 64).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            for batch in DataLoader(Lines(), 4, collate_fn=padded):
                seen.append((*batch.shape, int(batch.sum())))
                model(batch.cuda()).sum().backward()
                optimizer.step()

        record(run, **how)
        return seen

    plain, ahead = values(steps=6), values(scan_seconds=LONG_ENOUGH)
    assert plain[:2] == ahead[:2]  # read before
    assert max(plain, key=lambda one: one[1])[1] <= max(ahead, key=lambda one: one[1])[1]


def test_a_loader_without_an_end() -> None:
    class Endless(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                yield torch.zeros(random.randint(1, 50))

    def run() -> None:
        model = nn.Linear(1, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for batch in DataLoader(Endless(), 4, collate_fn=padded):
            model(batch.cuda()[..., None]).sum().backward()
            optimizer.step()

    trace = record(run, scan_seconds=0.2)
    assert trace.meta.batches[0].bytes and not trace.meta.batches[0].complete
    assert any("the first " in note and "were read" in note for note in trace.meta.notes)


def test_a_dataset_that_fails_is_said() -> None:
    class Broken(Texts):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 90:
                raise OSError("no such record")
            return super().__getitem__(index)

    def run() -> None:
        model = nn.Embedding(4000, 16).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for batch in DataLoader(Broken(ragged(4, 96)), 8, collate_fn=padded):
            model(batch.cuda()).sum().backward()
            optimizer.step()

    trace = record(run, scan_seconds=LONG_ENOUGH)
    assert any("reading the data loader ahead ended: OSError" in n for n in trace.meta.notes)
    assert len(trace.meta.batches[0].bytes) == 11


def test_a_script_may_pickle_its_tensors() -> None:
    def run() -> None:
        kept = pickle.loads(pickle.dumps({"a": torch.arange(5), "b": torch.ones(2)[1:]}))
        assert kept["a"].tolist() == [0, 1, 2, 3, 4] and kept["b"].tolist() == [1.0]
        torch.zeros(3, device="cuda")

    record(run)


def evaluating(every: int, collects: bool = False) -> Callable[[], None]:
    """It evaluates batches of many sizes, eight times as large as those that it is trained on."""

    def run() -> None:
        torch.manual_seed(1)
        loader = DataLoader(Texts(ragged(5)), 8, shuffle=True, collate_fn=padded)
        others = DataLoader(Texts(ragged(6)), 64, collate_fn=padded)
        model = nn.Sequential(nn.Embedding(4000, 256), nn.Linear(256, 4000)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for number, batch in enumerate(loader, 1):
            tokens = batch.cuda()
            logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % every == 0:
                with torch.no_grad():
                    kept = []
                    for rows in others:
                        logits = model(rows.cuda())
                        kept += [logits] if collects else []
                    del kept

    return run


def test_an_evaluation_in_mid_epoch_is_brought_forward() -> None:
    """With all its batches: each is of another size."""
    foretold = record(evaluating(1000), scan_seconds=LONG_ENOUGH)
    complete = record(evaluating(BATCHES), steps=10 * BATCHES)
    assert foretold.meta.optimizer_steps < 16
    assert [len(run.bytes) for run in foretold.meta.batches] == [BATCHES, BATCHES // 8]
    for found, true in zip(peaks(foretold), peaks(complete), strict=True):
        assert true * 0.99 <= found <= true * 1.05


def test_an_evaluation_is_brought_forward_behind_a_batch_that_was_looked_at() -> None:
    """It seems to be fetched ahead, but none is in hand when the loader runs dry."""

    def run() -> None:
        loader = DataLoader(Texts([64] * 8 * BATCHES), 8, collate_fn=padded)
        model = nn.Embedding(4000, 16).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        reading = iter(loader)
        assert next(reading).shape == (8, 64)
        for number, batch in enumerate(reading, 1):
            model(batch.cuda()).sum().backward()
            optimizer.step()
            if number % 1000 == 0:
                with torch.no_grad():
                    model(torch.zeros(1 << 20, dtype=torch.long, device="cuda"))

    assert (1 << 20) * 16 * 4 in record(run, scan_seconds=LONG_ENOUGH).events.bytes


def test_a_loop_that_collects_what_it_evaluates() -> None:
    """Each batch leaves memory behind, so none is made up: the loader is read to its end."""
    foretold = record(evaluating(1000, collects=True), scan_seconds=LONG_ENOUGH)
    complete = record(evaluating(BATCHES, collects=True), steps=10 * BATCHES)
    assert peaks(foretold)[1] >= peaks(complete)[1]


def test_layers_that_are_trained_later_get_their_largest_batch() -> None:
    def run() -> None:
        torch.manual_seed(1)
        loader = DataLoader(Texts(ragged(5)), 8, shuffle=True, collate_fn=padded)
        model = nn.Sequential(nn.Embedding(4000, 256), nn.Linear(256, 4000)).cuda()
        for learned in (model[1], model):
            optimizer = torch.optim.AdamW(learned.parameters())
            model[0].requires_grad_(learned is model)
            for batch in loader:
                tokens = batch.cuda()
                logits = model(tokens)
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()

    foretold, complete = record(run, scan_seconds=LONG_ENOUGH), record(run, steps=10 * BATCHES)
    assert len(foretold.meta.batches) == 2
    # In the order that the job will have: the first epoch drew from the generator to its end.
    assert peaks(foretold)[1:] == peaks(complete)[1:]
    assert peaks(foretold)[0] == pytest.approx(peaks(complete)[0], rel=0.005)


@pytest.mark.parametrize("lengths", [ragged(1), [64] * 8 * BATCHES])
def test_what_follows_the_last_epoch_is_seen(lengths: list[int]) -> None:
    def run() -> None:
        torch.manual_seed(1)
        loader = DataLoader(Texts(lengths), 8, shuffle=True, collate_fn=padded)
        scores = DataLoader(Texts(ragged(6, 64)), 64, collate_fn=padded)
        model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 40)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _epoch in range(20):
            for batch in loader:
                model(batch.cuda()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for batch in scores:
                    model(batch.cuda())
        with torch.no_grad():
            model(torch.zeros(1 << 20, dtype=torch.long, device="cuda"))

    trace = record(run, scan_seconds=LONG_ENOUGH)
    assert (1 << 20) * 40 * 4 in trace.events.bytes
    assert not any("does after the training" in note for note in trace.meta.notes)
    read_ahead = [run.bytes for run in trace.meta.batches if len(run.bytes) == 1]
    assert len(read_ahead) <= 1, "the evaluation of later epochs is read ahead no more"


def test_batches_of_one_size_that_run_different_operators() -> None:
    def run() -> None:
        torch.manual_seed(1)
        loader = DataLoader(Texts(ragged(5)), 8, collate_fn=padded)
        model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for batch in loader:
            model(batch.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        looked_at = itertools.cycle(("erf", "tanh", "sin", "cos", "exp", "log", "sqrt", "abs"))
        for batch in DataLoader(Texts(ragged(5)), 8, collate_fn=padded):
            with torch.no_grad():
                getattr(model(batch.cuda()), next(looked_at))()

    trace = record(run, scan_seconds=LONG_ENOUGH)
    assert settled(trace, AllocatorSettings()).turns > 0


def test_a_scan_closes_its_own_files_once() -> None:
    scan = LoaderScan(DataLoader(Texts([2])), iter)
    assert scan.result(LONG_ENOUGH).complete
    others = os.pipe()
    scan.end()
    for number in others:
        os.close(number)
