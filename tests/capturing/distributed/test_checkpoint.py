"""Distributed checkpoints: every rank writes its part, rank 0 holds the whole where asked to."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from memplan.capturing.sandbox import Sandbox
from memplan.capturing.session import CaptureSession
from memplan.capturing.standins.rules import running
from memplan.estimation.host import host_memory
from memplan.simulate import AllocatorSettings
from memplan.types.errors import CaptureError
from memplan.types.trace import EventKind, Trace
from tests.capturing.distributed.ranks import capture, join, options
from tests.capturing.distributed.test_host import only_tensors

RANKS, LAYERS, SIDE = 4, 3, 1024
WHOLE = LAYERS * SIDE * SIDE * 4
"""Bytes of all parameters."""
SLACK = 4096
"""Of step counts."""

Job = tuple[nn.Module, torch.optim.Optimizer]


def captured(job: Callable[[], None], rank: int) -> Trace:
    session = CaptureSession(options(rank, RANKS, steps=20))
    box = Sandbox(
        on_note=session.notes.append,
        is_fake=lambda tensor: isinstance(tensor, FakeTensor),
        new_tensor=session.new_tensor,
    )
    with box, session:
        join()
        job()
    return session.trace()


def host_tensors(trace: Trace) -> int:
    """The host's peak, without this process's own memory."""
    answer = host_memory(only_tensors(trace), AllocatorSettings())
    assert answer is not None
    parts = answer.breakdown
    return parts.parameters + parts.gradients + parts.optimizer_state + parts.tensors


def sharded(version: int = 2) -> Job:
    layers = [nn.Linear(SIDE, SIDE, bias=False, device="cuda") for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*layers)
    if version == 2:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, SIDE, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_states(version: int) -> None:
    model, optimizer = sharded(version)
    if version == 2:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, states = get_state_dict(model, optimizer, options=whole)
    else:
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ):
            weights = model.state_dict()
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert len(weights) == (LAYERS if dist.get_rank() == 0 else 0)
    assert bool(states.get("state")) == (dist.get_rank() == 0)
    train(model, optimizer)


@pytest.mark.parametrize("version", [1, 2])
def test_rank_0_holds_the_whole_on_the_host(version: int) -> None:
    first, second = (captured(lambda: whole_states(version), rank) for rank in (0, 1))
    assert 0 <= host_tensors(first) - 3 * WHOLE < SLACK  # parameters and two states
    assert host_tensors(second) < WHOLE


@pytest.mark.parametrize("rank", [0, 1])
def test_summoned_parameters_go_to_the_host_one_by_one(rank: int) -> None:
    """FSDP's `summon_full_params`, as a script saves with it: rank 0 copies each gathered layer to
    the host and frees it before the next; so it does when they come back."""
    flat = FullyShardedDataParallel
    rows: list[int] = []

    def job() -> None:
        layers = [nn.Linear(SIDE, SIDE, bias=False, device="cuda") for _ in range(LAYERS)]
        model = flat(nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        train(model, torch.optim.SGD(model.parameters()))
        mode = running()
        assert mode is not None
        builder = mode.recorder.builder
        rows.append(len(builder))
        with flat.summon_full_params(model, writeback=False, offload_to_cpu=True, rank0_only=True):
            held = [parameter.device.type for parameter in model.parameters()]
        assert held == ["cpu" if rank == 0 else "cuda"] * LAYERS
        rows.append(len(builder))

    trace = captured(job, rank)
    summoned = list(trace)[slice(*rows)]
    layer, sizes = WHOLE // LAYERS, {EventKind.ALLOC: 1, EventKind.FREE: -1}
    levels = list(accumulate(event.bytes * sizes.get(event.kind, 0) for event in summoned))
    assert max(levels) - min(levels) == layer
    gathered = [event.bytes for event in summoned if event.kind == EventKind.ALLOC]
    assert gathered == [layer] * (2 * LAYERS if rank == 0 else LAYERS)
    assert host_tensors(trace) == (WHOLE if rank == 0 else 0)


def test_states_of_flat_parameters_from_another_rank() -> None:
    """Without `use_orig_params` rank 0 says which there are; loading from it alone is refused."""
    flat = FullyShardedDataParallel
    settings = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )

    def job() -> None:
        model = flat(nn.Linear(64, 64), device_id=torch.cuda.current_device())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        whole = flat.optim_state_dict(model, optimizer)
        assert list(whole["state"]) == ["weight", "bias"]
        optimizer.load_state_dict(flat.optim_state_dict_to_load(model, optimizer, whole))
        with flat.state_dict_type(model, *settings):
            assert not flat.optim_state_dict(model, optimizer)
            flat.optim_state_dict_to_load(model, optimizer, {})

    with pytest.raises(CaptureError, match="rank 0 alone holds"):
        captured(job, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_is_saved_and_loaded(tmp_path: Path, rank: int) -> None:
    def job() -> None:
        model, optimizer = sharded()
        weights, states = get_state_dict(model, optimizer)
        parts: dict[str, Any] = {"model": weights, "optimizer": states}
        save(parts, checkpoint_id=tmp_path / "saved")
        load(parts, checkpoint_id=tmp_path / "saved")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
        train(model, optimizer)

    trace = captured(job, rank)
    assert "rank" in [item.kind for item in trace.meta.assumptions]
    assert not (tmp_path / "saved").exists(), "what a capture writes is not there afterwards"


@pytest.mark.parametrize(("way", "rank"), [("thread", 1), ("process", 0), ("stager", 1)])
def test_an_asynchronous_save_keeps_a_copy_on_the_host(tmp_path: Path, way: str, rank: int) -> None:
    copies: list[int] = []

    def job() -> None:
        model, optimizer = sharded()
        weights, states = get_state_dict(model, optimizer)
        options: dict[str, Any] = {"process_group": dist.new_group(backend="gloo")}
        if way == "process":
            options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        if way == "stager":
            options["async_stager"] = DefaultStager(StagingOptions(True, False, True, True))
        begun = async_save(
            {"model": weights, "optimizer": states}, checkpoint_id=tmp_path, **options
        )
        train(model, optimizer)
        upload = begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun
        upload.result()
        copies.append(1)

    trace = captured(job, rank)
    assert copies, "the save did not come to its end"
    # A copy of this rank's parameters and two states; and, for a moment, one part more: PyTorch
    # makes an empty distributed tensor to hang each copy into.
    copy, part = 3 * WHOLE // RANKS, SIDE * SIDE * 4 // RANKS
    assert copy <= host_tensors(trace) <= copy + part + SLACK


def test_megatrons_process_that_stays_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get the device's tensors by CUDA's IPC, and the job would wait for it for ever."""
    place = tmp_path.joinpath("megatron", "core", "dist_checkpointing", "strategies")
    place.mkdir(parents=True)
    place.joinpath("async_utils.py").write_text(
        "class TemporalAsyncCaller:\n"
        "    def schedule_async_call(self, request):\n"
        "        return 'forked'\n"
        "class PersistentAsyncCaller:\n"
        "    @classmethod\n"
        "    def _get_process(cls, rank, mp_mode='spawn'):\n"
        "        raise AssertionError('started')\n"
        "    def schedule_async_call(self, request):\n"
        "        return self._get_process(0)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "megatron.core.dist_checkpointing.strategies.async_utils"

    def job() -> None:
        join()
        utils = importlib.import_module(name)
        utils.PersistentAsyncCaller._get_process(0, "forkserver")
        assert utils.PersistentAsyncCaller().schedule_async_call(None) == "forked"
        torch.empty(1, device="cuda")

    trace = capture(job)
    for made in [one for one in sys.modules if one.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, made)
    assert [item.op for item in trace.meta.assumptions] == ["async_save"]
