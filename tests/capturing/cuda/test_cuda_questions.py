"""`torch.cuda` and its neighbours answer as the chosen device would."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from memplan.capturing.options import CaptureOptions, RankPlace
from memplan.capturing.session import CaptureSession
from memplan.estimation import estimate
from memplan.types.device import find_profile
from memplan.types.trace import Phase
from tests.capturing.jobs import record, sizes

PROFILE = find_profile("a100-80gb")
MIB = 1 << 20


def test_the_device() -> None:
    def job() -> None:
        cuda = torch.cuda
        assert cuda.is_available()
        assert cuda.device_count() == 1
        assert cuda.current_device() == 0
        assert cuda.get_device_name(0) == PROFILE.device_name
        assert cuda.get_device_capability() == (8, 0)
        assert cuda.is_bf16_supported()
        assert cuda.get_device_properties("cuda").total_memory == PROFILE.total_memory_bytes
        assert torch.backends.cudnn.is_available()
        assert torch.version.cuda
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        with cuda.device(0), cuda.nvtx.range("a"):
            pass

    record(job)


def test_every_device_property_that_pytorch_documents() -> None:
    text = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    body = text.split("class _CudaDeviceProperties:")[1].split("\n\n")[0]
    names = re.findall(r"^    (\w+):", body, re.MULTILINE)
    assert len(names) > 10

    def job() -> None:
        properties = torch.cuda.get_device_properties(0)
        assert [name for name in names if not hasattr(properties, name)] == []

    record(job)


def test_profilers_see_the_host() -> None:
    def job() -> None:
        linear = nn.Linear(4, 4).cuda()
        activity = torch.profiler.ProfilerActivity
        for activities in ([activity.CPU, activity.CUDA], [activity.CUDA]):
            with torch.profiler.profile(activities=activities, with_stack=True) as profile:
                linear(torch.ones(2, 4, device="cuda"))
            assert profile.key_averages()
        with torch.autograd.profiler.emit_nvtx(), torch.cuda.profiler.profile():
            linear(torch.ones(2, 4, device="cuda"))
        assert torch.cuda.cudart().cudaProfilerStop() == torch.cuda.cudart().cudaError.success

    record(job)


def test_memory_questions_follow_the_record() -> None:
    def job() -> None:
        cuda = torch.cuda
        free, total = cuda.mem_get_info()
        assert free < total == PROFILE.total_memory_bytes
        before = cuda.memory_allocated()
        x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
        assert cuda.memory_allocated() - before == 10 * MIB
        assert cuda.max_memory_allocated() >= cuda.memory_allocated()
        assert cuda.memory_reserved() >= cuda.memory_allocated()
        assert cuda.memory_stats()["inactive_split_bytes.all.peak"] == 0
        assert cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] >= 10 * MIB
        del x
        assert cuda.memory_allocated() == before
        cuda.reset_peak_memory_stats()
        assert cuda.max_memory_allocated() == before
        cuda.memory._record_memory_history()
        cuda.memory._snapshot()
        assert isinstance(cuda.memory_summary(), str)

    record(job)


def test_what_the_cache_holds_until_it_is_given_back() -> None:
    def job() -> None:
        cuda = torch.cuda
        free, _ = cuda.mem_get_info()
        x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
        held = cuda.memory_reserved()
        del x
        cuda.reset_peak_memory_stats()
        assert cuda.memory_reserved() == held >= 10 * MIB
        assert free - cuda.mem_get_info()[0] == held
        cuda.empty_cache()
        assert cuda.memory_reserved() == 0
        assert cuda.mem_get_info()[0] == free
        assert cuda.max_memory_reserved() == held

    record(job)


def test_a_fraction_of_the_card_is_an_allocator_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,")

    def job() -> None:
        with pytest.raises(ValueError, match="Allowed range"):
            torch.cuda.set_per_process_memory_fraction(2.0)
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        torch.empty(41 << 30, dtype=torch.uint8, device="cuda")

    trace = record(job)
    assert trace.meta.alloc_conf == "expandable_segments:True,per_process_memory_fraction:0.5"
    assert estimate(trace, PROFILE).fits is False
    whole = replace(trace, meta=msgspec.structs.replace(trace.meta, alloc_conf=""))
    assert estimate(whole, PROFILE).fits is True


def test_random_state() -> None:
    def job() -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        assert generator.device == torch.device("cuda", 0)
        torch.randn(3, device="cuda", generator=generator)
        torch.randperm(10, device="cuda", generator=generator)
        generator.set_state(generator.get_state())
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        torch.cuda.manual_seed_all(3)
        torch.cuda.default_generators[0].seed()
        with torch.random.fork_rng(devices=[0]):
            torch.rand(3, device="cuda")
        default = torch.cuda.default_generators[0]
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        assert state.dtype == torch.uint8
        assert state.tolist() == default.get_state().tolist() == [5] + 15 * [0]
        kept = default.clone_state()
        same = default.graphsafe_get_state()
        torch.cuda.manual_seed(6)
        default.set_offset(8)
        assert (kept.initial_seed(), same.initial_seed(), same.get_offset()) == (5, 6, 8)
        default.set_state(state)
        assert torch.cuda.initial_seed() == 5
        default.graphsafe_set_state(kept)
        torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
        with pytest.raises(RuntimeError, match="wrong size"):
            default.set_state(torch.get_rng_state())
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)

    record(job)


def test_data_parallel_on_the_one_device() -> None:
    def job() -> None:
        model = nn.DataParallel(nn.Linear(4, 4).cuda())
        model(torch.ones(2, 4)).sum().backward()
        assert model.module.weight.grad is not None

    record(job)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gradient_of_what_data_parallel_is_given_is_a_copy(device: str) -> None:
    def job() -> None:
        x = torch.ones(200, 4, device=device, requires_grad=True)
        nn.DataParallel(nn.Linear(4, 6).cuda())(x).sum().backward()
        assert x.grad is not None and x.grad.device.type == device

    copies = sizes(record(job), Phase.BACKWARD, op="clone")
    assert copies.count(4 * 200 * 4) == (device == "cuda")


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    record(lambda: torch.ones(1, device="cuda"))
    assert dict(os.environ) == before


@pytest.mark.parametrize("ask", ["torch.cuda.device_count()", "torch.accelerator.device_count()"])
@pytest.mark.parametrize("file", ["train.py", "site-packages/lib/devices.py"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_counts_the_gpus_is_told_so(
    ask: str, file: str, ranks: int, tmp_path: Path
) -> None:
    """Where one process alone is captured, it divides by a number that is an assumption; libraries
    ask for reasons of their own."""
    code = compile(f"count = {ask}", str(tmp_path / file), "exec")
    place = RankPlace(rank=0, world_size=ranks, local_world_size=ranks) if ranks > 1 else None
    told: dict[str, int] = {}
    options = CaptureOptions(profile=find_profile("h100"), place=place)
    with CaptureSession(options) as session:
        exec(code, {"torch": torch}, told)
    assert told["count"] == ranks
    assumed = [item for item in session.trace().meta.assumptions if item.kind == "devices"]
    if file == "train.py" and ranks == 1:
        assert [item.source for item in assumed] == [f"{tmp_path / file}:1"]
        assert "--world-size N" in assumed[0].text
    else:
        assert not assumed
