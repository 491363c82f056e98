"""Callbacks in real trainings on the CPU. Where a card is needed, its driver's figures alone are
made up."""

from __future__ import annotations

import csv
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import memplan
from memplan.integrations import measured
from memplan.integrations.measured import Beside, Measured
from memplan.types.errors import MemplanError, UsageError
from memplan.types.estimate import Estimate
from memplan.types.trace_file import save_trace

GIB = 1 << 30
CARD = Measured(
    allocated_peak=2 * GIB, reserved_peak=3 * GIB, reserved=3 * GIB, used=4 * GIB, total=8 * GIB
)
KEYS = {
    "gpu_memory/reserved_peak_gib",
    "gpu_memory/reserved_estimate_gib",
    "gpu_memory/reserved_estimate_high_gib",
    "gpu_memory/allocated_peak_gib",
    "gpu_memory/allocated_estimate_gib",
    "gpu_memory/card_used_gib",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        return {"loss": self.linear(x).square().mean()}


ROWS = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(12)]


@pytest.fixture(scope="module")
def captured() -> memplan.api.Capture:
    with memplan.capture() as made:
        model = nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(64, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return made


@pytest.fixture(scope="module")
def estimate(captured: memplan.api.Capture) -> Estimate:
    made = captured.estimate()
    return msgspec.structs.replace(made, reserved_peak_bytes=3 * GIB, reserved_high_bytes=4 * GIB)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Measured]]:
    """The figures of the next measurements; the last one stays."""
    figures = [CARD]
    monkeypatch.setattr(
        measured, "measure", lambda _: figures.pop(0) if len(figures) > 1 else figures[0]
    )
    yield figures


def train_with_trainer(
    folder: Path, estimate: Estimate | str, report_to: str | list[str] = "none", **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    from memplan.integrations.huggingface import MemplanCallback

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=report_to,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=ROWS)
    trainer.add_callback(MemplanCallback(trainer, estimate, **options))
    trainer.train()
    return trainer


def test_trainer_logs_each_nth_step(
    tmp_path: Path, estimate: Estimate, card: list[Measured]
) -> None:
    trainer = train_with_trainer(tmp_path, estimate, every=2)
    logged = [row for row in trainer.state.log_history if KEYS & row.keys()]
    assert [row["step"] for row in logged] == [2, 4, 6]
    assert logged[0].keys() >= KEYS
    assert logged[0]["gpu_memory/reserved_peak_gib"] == 3
    assert logged[0]["gpu_memory/reserved_estimate_high_gib"] == 4


def test_trainer_on_the_cpu_says_so_and_measures_nothing(
    tmp_path: Path, captured: memplan.api.Capture, caplog: pytest.LogCaptureFixture
) -> None:
    save_trace(captured.trace(), tmp_path / "job.trace")
    trainer = train_with_trainer(tmp_path, str(tmp_path / "job.trace"), every=1)
    assert not [row for row in trainer.state.log_history if KEYS & row.keys()]
    said = [record.message for record in caplog.records if record.name == "memplan"]
    assert said == ["memplan: no GPU: on cpu no memory is measured beside the estimate"]


def train_with_accelerate(estimate: Estimate, steps: int = 6) -> list[tuple[int, dict[str, Any]]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.tracking import GeneralTracker, on_main_process

    from memplan.integrations.huggingface import watch

    logged: list[tuple[int, dict[str, Any]]] = []

    class Tracker(GeneralTracker):  # type: ignore[misc]  # untyped
        name = "ours"
        requires_logging_directory = False
        tracker = None

        @on_main_process  # type: ignore[untyped-decorator]
        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            logged.append((step or 0, values))

    AcceleratorState._reset_state(reset_partial_state=True)  # of the tests before
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, log_with=Tracker(), gradient_accumulation_steps=2)
    accelerator.init_trackers("job")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    handle = watch(accelerator, optimizer, estimate, every=2)
    for batch in range(2 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(2, 4))["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if batch == 2 * steps - 3:
            handle.remove()
    return logged


def test_accelerate_logs_each_nth_step(estimate: Estimate, card: list[Measured]) -> None:
    logged = train_with_accelerate(estimate)
    assert [step for step, _ in logged] == [2, 4]  # removed before the sixth
    assert logged[0][1].keys() == KEYS


def test_accelerate_on_the_cpu(estimate: Estimate, caplog: pytest.LogCaptureFixture) -> None:
    assert train_with_accelerate(estimate) == []
    assert "no GPU" in caplog.text


# xdist imports a warning's module in a process of its own, in which torchvision is not prepared.
quiet = pytest.mark.filterwarnings("ignore")


def train_with_lightning(estimate: Estimate, loggers: Any, **options: Any) -> None:
    """Six steps, a measurement at every second one."""
    from lightning.pytorch import LightningModule, Trainer

    from memplan.integrations.lightning import MemplanCallback

    class Job(LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=loggers,
        callbacks=[MemplanCallback(estimate, every=2)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    rows = len(ROWS) // 6 // options.get("accumulate_grad_batches", 1)
    batches: Any = torch.utils.data.DataLoader(ROWS, batch_size=rows)  # type: ignore[arg-type]
    trainer.fit(Job(), batches)


def lightning_rows(folder: Path, estimate: Estimate) -> list[dict[str, str]]:
    """What its own CSV logger has, with accumulated gradients."""
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(folder))
    train_with_lightning(estimate, logger, accumulate_grad_batches=2)
    file = Path(logger.log_dir, "metrics.csv")
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@quiet
def test_lightning_logs_each_nth_step(
    tmp_path: Path, estimate: Estimate, card: list[Measured]
) -> None:
    rows = lightning_rows(tmp_path, estimate)
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    assert rows[0].keys() >= KEYS
    assert float(rows[0]["gpu_memory/card_used_gib"]) == 4


@quiet
def test_lightning_on_the_cpu(
    tmp_path: Path, estimate: Estimate, caplog: pytest.LogCaptureFixture
) -> None:
    assert lightning_rows(tmp_path, estimate) == []
    assert "no GPU" in caplog.text


def test_it_warns_once_before_the_card_is_full(
    estimate: Estimate, card: list[Measured], caplog: pytest.LogCaptureFixture
) -> None:
    cached = dataclasses.replace(CARD, reserved=7 * GIB, used=8 * GIB)
    nearly = dataclasses.replace(cached, allocated_peak=6 * GIB + GIB // 2)
    card[:] = [CARD, cached, nearly, nearly]
    beside = Beside(estimate, every=1, warn_at=0.9)
    said = []
    for step in range(1, 5):
        beside.figures(step, "cuda")
        said.append([record.message for record in caplog.records])
        caplog.clear()
    assert said[:2] == [[], []]  # what is kept for reuse does not fill a card
    assert said[2] == ["memplan: the card is nearly full: 7.5 GiB of 8.0 GiB needed at the peak"]
    assert said[3] == []


def test_it_says_what_the_estimate_did_not_foresee(
    estimate: Estimate, card: list[Measured], caplog: pytest.LogCaptureFixture
) -> None:
    card[:] = [dataclasses.replace(CARD, reserved_peak=5 * GIB)]
    Beside(estimate, every=1, warn_at=1.0).figures(1, "cuda")
    assert "above the estimate's high bound of 4.0 GiB" in caplog.text
    large = msgspec.structs.replace(estimate, high_bytes=9 * GIB)
    Beside(large, every=1, warn_at=1.0).begin("cuda")
    assert "of 8.0 GiB may not fit" in caplog.text


@pytest.mark.parametrize("wrong", [{"every": 0}, {"warn_at": 0.0}, {"warn_at": 1.5}])
def test_figures_that_are_none(estimate: Estimate, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Beside(estimate, **{"every": 1, "warn_at": 0.5, **wrong})


def test_a_file_that_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"a": 1}')
    with pytest.raises(MemplanError, match="no answer of memplan"):
        Beside(str(tmp_path / "job.json"), 1, 0.9)


def test_logging_is_left_as_it_is() -> None:
    assert logging.getLogger("memplan").handlers == []
