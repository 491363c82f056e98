"""Phases of jobs that frameworks drive, as hooks tell them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.planned.listening import listening


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))


def _train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_fsdp2(alone: None) -> None:
    model = _layers()
    mesh = init_device_mesh("cpu", (1,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    with listening(modules=True) as (heard, hooks):
        _train(model, 1)
        hooks.watch_roots()
        _train(model, 1)
    assert heard.text == "F B O | F B O | F"
    assert [path.rpartition(".")[2] for path in heard.modules].count("1") == 2


def test_ddp(alone: None) -> None:
    with listening() as (heard, _):
        _train(DistributedDataParallel(_layers()))
    assert heard.text == "F B O | F B O | F"


def test_a_pipeline_schedule(alone: None) -> None:
    model = _layers()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with listening() as (heard, _):
        for _ in range(2):
            schedule.step(torch.randn(8, 8), target=torch.randn(8, 8))
            optimizer.step()
            optimizer.zero_grad()
    assert heard.text == "F B O | F B O | F"  # all micro-batches forward, then all backward


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    rows: list[dict[str, Any]] = [
        {"input_ids": torch.arange(8) % 32, "labels": torch.arange(8) % 32} for _ in range(8)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, use_cpu=True,
        gradient_accumulation_steps=2, report_to=[], eval_strategy="steps", eval_steps=2,
        save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=rows[:1])
    with listening() as (heard, hooks):
        trainer.train()
        hooks.watch_roots()
    step = "F B F B O |"
    words = heard.text.replace(" E (F)", "").replace("F F", "F")
    assert words == " ".join([step] * 4 + ["F"])
    assert heard.words.count("E") == 2  # evaluations after steps 2 and 4


# xdist imports a warning's module in a process of its own, in which torchvision is not prepared.
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with listening() as (heard, _):
        rows = torch.utils.data.TensorDataset(torch.randn(4, 8))
        trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2))
    # Forward and backward run within the optimizer's step, which is given them as a closure.
    assert heard.text == "F B | F B | F"
