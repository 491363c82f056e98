"""Figures in TensorBoard, MLflow and Weights & Biases, by the frameworks' own loggers: what the
three keep on the disk is read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import memplan
from memplan.integrations import measured
from memplan.types.estimate import Estimate
from tests.integrations.test_trainers import (
    CARD,
    KEYS,
    Model,
    quiet,
    train_with_lightning,
    train_with_trainer,
)

TRACKERS = ["tensorboard", "mlflow", "wandb"]
RESERVED = "gpu_memory/reserved_peak_gib"
STEPS = [2, 4, 6]


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    with memplan.capture() as captured:
        torch.nn.Linear(64, 64).cuda()
    return captured.estimate()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measured, "measure", lambda _: CARD)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(tmp_path),
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard"),
    }.items():
        monkeypatch.setenv(name, value)
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    wandb.teardown()  # it has read the environment of whoever used it first in this process
    yield
    mlflow.end_run()
    wandb.teardown()


def check(folder: Path, prefix: str = "") -> None:
    """Each of the three has every figure of every second step; `prefix`: of the Trainer's, in two
    of them."""
    name = prefix + RESERVED
    events = {path.parent for path in folder.rglob("events.out.tfevents*")}
    kept = [EventAccumulator(str(path)).Reload() for path in events]
    found = {tag: each for each in kept for tag in each.Tags()["scalars"]}
    assert found.keys() >= {prefix + key for key in KEYS}
    assert [(row.step, row.value) for row in found[name].Scalars(name)] == [
        (step, 3.0) for step in STEPS
    ]
    client = mlflow.MlflowClient()
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.data.metrics.keys() >= KEYS
    history = client.get_metric_history(run.info.run_id, RESERVED)
    # Transformers writes them from threads, which may overtake each other.
    assert sorted((row.step, row.value) for row in history) == [(step, 3.0) for step in STEPS]
    wandb.teardown()  # `finish` does not wait until its process has written all
    [log] = folder.rglob("run-*.wandb")
    assert [row[name] for row in wandb_rows(log) if name in row] == [3.0] * len(STEPS)


def wandb_rows(log: Path) -> list[dict[str, Any]]:
    """What the file of an offline run holds: a log of LevelDB's format, of records in Protobuf."""
    from wandb.proto import wandb_internal_pb2

    data, rows, at, whole = log.read_bytes(), [], 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header in this block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(whole)
            items = record.history.item
            named = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            rows.append({name: json.loads(value) for name, value in named.items()})
            whole = b""
    return rows


def test_trainer(tmp_path: Path, estimate: Estimate) -> None:
    train_with_trainer(tmp_path, estimate, report_to=TRACKERS, every=2)
    check(tmp_path, "train/")


def test_accelerate(tmp_path: Path, estimate: Estimate) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from memplan.integrations.huggingface import watch

    AcceleratorState._reset_state(reset_partial_state=True)  # of the tests before
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, log_with=TRACKERS, project_dir=str(tmp_path))
    accelerator.init_trackers("job")
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watch(accelerator, optimizer, estimate, every=2)
    for _ in range(6):
        accelerator.backward(model(torch.randn(2, 4))["loss"])
        optimizer.step()
    accelerator.end_training()
    check(tmp_path)


@quiet
def test_lightning(tmp_path: Path, estimate: Estimate) -> None:
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

    loggers = [
        TensorBoardLogger(str(tmp_path)),
        MLFlowLogger(tracking_uri=f"file:{tmp_path / 'mlruns'}"),
        WandbLogger(save_dir=str(tmp_path), offline=True),
    ]
    train_with_lightning(estimate, loggers)
    check(tmp_path)
