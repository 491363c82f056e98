"""What a process sees of the planned allocator: PyTorch's memory functions, refusals, installing
it; over a library that keeps books alone, for there is no GPU here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import memplan
from memplan.runtime.planned import install, pluggable
from memplan.runtime.planned.job import Job
from memplan.runtime.planned.recording import observed_meta
from memplan.runtime.planned.refusals import NotServedError, Refusals, check_settings
from memplan.runtime.planned.statistics import MemoryFunctions, Peaks
from memplan.types.alloc_conf import conf_in
from memplan.types.errors import FormatError, UsageError
from memplan.types.plan import Fingerprint, Plan
from tests.runtime.planned.fake_library import FakeLibrary

REPLACED = ("_cuda_memoryStats", "_cuda_emptyCache", "_accelerator_getDeviceStats")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    """PyTorch's functions answer for this library, as if CUDA had begun."""
    library = FakeLibrary()
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_get_device_index", lambda device=None, optional=False: device or 0
    )
    monkeypatch.setattr(
        torch.accelerator.memory, "_get_device_index", lambda device=None, optional=False: 0
    )
    with MemoryFunctions(cast(Any, library), Peaks(cast(Any, library)), [0]):
        yield library


def test_pytorchs_functions_answer_for_the_library(library: FakeLibrary) -> None:
    first, second = library.malloc(1000), library.malloc(5000)
    library.free(second)
    cuda = torch.cuda
    assert cuda.memory_allocated() == 1024 and cuda.max_memory_allocated() == 1024 + 5120
    assert cuda.memory_reserved() == cuda.max_memory_reserved() == 1024 + 5120
    stats = cuda.memory_stats()
    assert stats["requested_bytes.all.current"] == 1000
    assert (stats["allocation.all.current"], stats["allocation.all.allocated"]) == (1, 2)
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_reserved() == cuda.max_memory_allocated() == 1024
    library.free(first)
    assert cuda.memory_allocated() == 0
    assert torch.accelerator.memory_allocated() == 0
    assert torch.accelerator.max_memory_allocated() == 1024


def test_a_device_without_requests_has_zeros(library: FakeLibrary) -> None:
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_snapshot() == []


def test_a_snapshot_has_segments_and_blocks(library: FakeLibrary) -> None:
    library.malloc(1000)
    library.malloc(600)
    (segment,) = torch.cuda.memory_snapshot()
    assert segment["total_size"] == segment["allocated_size"] == 2048
    assert segment["requested_size"] == 1600
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated"] * 2
    assert torch.cuda.memory._snapshot()["segments"] == [segment]


def test_the_summary_is_text(library: FakeLibrary) -> None:
    library.malloc(3 << 20)
    text = torch.cuda.memory_summary(0)
    assert "3 MiB" in text.replace("3.0 MiB", "3 MiB") and "hits" in text


def test_a_memory_fraction_becomes_a_limit(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _d: type("P", (), {"total_memory": 1000})
    )
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    assert library.limit == 250
    assert torch.cuda.get_per_process_memory_fraction(0) == 0.25


def _silent(_text: str) -> None:
    pass


def test_cudnns_benchmark_stays_off_and_says_so_once() -> None:
    said: list[str] = []
    with Refusals(said.append):
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.benchmark = False
        assert not said[1:] and "adaptor" in said[0]
        with torch.backends.cudnn.flags(benchmark=True):
            assert not torch.backends.cudnn.benchmark
    assert len(said) == 1
    torch.backends.cudnn.benchmark = True
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False


def test_everything_is_put_back() -> None:
    before = [getattr(torch._C, name, None) for name in REPLACED]
    summary, graph = torch.cuda.memory_summary, dict(vars(torch.cuda.CUDAGraph))
    library = cast(Any, FakeLibrary())
    with MemoryFunctions(library, Peaks(library), [0]), Refusals(_silent):
        assert torch._C._cuda_memoryStats is not before[0]
    assert [getattr(torch._C, name, None) for name in REPLACED] == before
    assert torch.cuda.memory_summary is summary
    assert dict(vars(torch.cuda.CUDAGraph)) == graph


def test_graphs_and_pools_are_refused_where_they_are_made() -> None:
    with Refusals(_silent):
        with pytest.raises(NotServedError, match="CUDA graphs") as graph:
            torch.cuda.CUDAGraph()
        with pytest.raises(NotServedError, match="MemPool"):
            torch.cuda.MemPool.__init__(cast(Any, None))  # without CUDA there is no base to make
    assert "reduce-overhead" in graph.value.hint


@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ("expandable_segments:True", "expandable_segments"),
        ("backend:cudaMallocAsync", "cudaMallocAsync"),
    ],
)
def test_settings_of_another_allocator_are_refused(conf: str, what: str) -> None:
    with pytest.raises(NotServedError, match=what):
        check_settings(conf)


def test_other_settings_are_not() -> None:
    check_settings("")
    check_settings("max_split_size_mb:128,expandable_segments:False")


def test_the_environments_settings_are_those_that_pytorch_reads() -> None:
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    assert conf_in({}) == ""
    assert conf_in({new: "max_split_size_mb:64"}) == "max_split_size_mb:64"
    assert conf_in({new: "max_split_size_mb:64", old: ""}) == ""


def test_without_a_gpu_a_warning_and_the_ordinary_allocator() -> None:
    with (
        pytest.warns(UserWarning, match="ordinary allocator"),
        memplan.planned() as running,
    ):
        assert not running.active and running.stats() == {}


def test_a_plan_without_an_allocation_part_is_refused() -> None:
    with pytest.raises(UsageError, match="no allocation part"):
        memplan.install(Plan(memplan_version="0.1.0"))


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.plan").write_bytes(b'{"schema_version": 1, "alloc')
    with pytest.raises(FormatError, match="not a plan of memplan"):
        memplan.install(tmp_path / "job.plan")


def test_cuda_that_has_begun_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="already initialised") as error:
        pluggable.check_not_started()
    assert "memplan run" in error.value.hint


def test_one_job_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pluggable, "why_not", lambda: "")
    job = Job(cast(Any, FakeLibrary()), [0], observed_meta([], "", "", ""))
    with install.follow(job) as running:
        assert running.active and running.stats()["steps"] == 0
        with pytest.raises(UsageError, match="already being served"):
            memplan.install()
    assert install._Process.running is None


RELEASE = torch.__version__.partition("+")[0]


@pytest.mark.parametrize(
    ("made_from", "said"),
    [
        (Fingerprint(torch_version="1.0"), "made with PyTorch 1.0"),
        (
            Fingerprint(command=["train.py", "--batch", "8"]),
            "for train.py --batch 8: where sizes differ",
        ),
        (Fingerprint(command=["other.py"]), "made for other.py"),
        (Fingerprint(ranks=8), "made for 8 ranks and this job has 2: a rank may need more"),
        (Fingerprint(ranks=2), ""),
        (Fingerprint(command=["here/train.py"], torch_version=f"{RELEASE}+other"), ""),
    ],
)
def test_a_plan_for_something_else_is_told(
    monkeypatch: pytest.MonkeyPatch, made_from: Fingerprint, said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    lines: list[str] = []
    install.compare(Plan(made_from=made_from), ["train.py"], lines.append)
    assert "".join(lines).find(said) >= 0 and len(lines) == bool(said)


def test_a_rank_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert install.job_devices() == [0, 1, 2, 3]
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert install.job_devices() == [2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank sees its card alone
    assert install.job_devices() == [0]


def test_pluggable_allocators_of_this_pytorch_are_put_together_from_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Native:
        def __init__(self) -> None:
            self.functions: dict[str, int] = {}

        def set_record_stream_fn(self, address: int) -> None:
            self.functions["record_stream"] = address

        def set_reset_fn(self, address: int) -> None:
            self.functions["reset"] = address

    native, current = Native(), list[Any]()

    class Pluggable:
        def __init__(self, path: str, malloc: str, free: str) -> None:
            self.names = path, malloc, free

        def allocator(self) -> Native:
            return native

    class Named(FakeLibrary):
        def address_of(self, name: str) -> int:
            return len(name)

    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable)
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", current.append)
    pluggable.use(cast(Any, Named()))
    assert current[0].names == ("fake.so", "memplan_torch_malloc", "memplan_free")
    assert native.functions == {
        "record_stream": len("memplan_record_stream"),
        "reset": len("memplan_torch_empty_cache"),
    }


def test_nothing_is_warned_of_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = Job(cast(Any, FakeLibrary()), [0], observed_meta([], "", "", ""))
        running = install.follow(job)
        assert torch.cuda.memory_allocated() == 0, "FakeLibrary answers"
        running.close()
