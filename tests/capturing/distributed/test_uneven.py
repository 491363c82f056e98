"""Megatron-FSDP's pieces of different sizes: each rank would hear those of the others."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from memplan.capturing.distributed.uneven import chunk
from memplan.capturing.options import CaptureOptions, RankPlace, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile


@dataclass
class Cut:
    dim: int


@dataclass
class StridedCut(Cut):
    split_factor: int = 2


class Copies:
    """Of a dimension of the mesh along which all have the same."""


@dataclass
class Mesh:
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, dim: int) -> int:
        return self.sizes[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


@dataclass
class Piece:
    shape: tuple[int, ...]
    local: tuple[int, ...]
    device_mesh: Mesh
    placements: tuple[Any, ...]

    def to_local(self) -> torch.Tensor:
        return torch.empty(self.local)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("rows", [0, 3, 10])
def test_a_piece_lies_within_its_parameter(rank: int, rows: int) -> None:
    made = chunk(Piece((10, 8), (rows, 8), Mesh((4,), (rank,)), (Cut(0),)))
    assert made.sizes == (rows, 8)
    assert made.offsets[1] == 0
    assert 0 <= made.offsets[0] <= 10 - rows
    if rank == 0:
        assert made.offsets[0] == 0
    if rank == 3:
        assert made.offsets[0] + rows == 10


def test_a_strided_cut_is_within_the_other() -> None:
    """Data-parallel pieces of what tensor parallelism left each rank: the last of the second half
    ends with the parameter, the last of the first half in the middle."""
    for half, end in ((0, 500), (1, 1000)):
        mesh = Mesh((4, 2), (3, half))
        made = chunk(Piece((1000, 8), (77, 8), mesh, (StridedCut(0), Cut(0))))
        assert made.offsets == (end - 77, 0)


def test_cuts_of_other_dimensions_and_copies() -> None:
    mesh = Mesh((2, 4, 2), (1, 1, 1))
    made = chunk(Piece((9, 8), (9 - 4, 4), mesh, (StridedCut(0), Copies(), Cut(1))))
    assert made.offsets == (4, 4)
    assert math.prod(made.sizes) == 20


LIBRARY = """
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

def gather_and_compute_chunk_metadata(dtensor):
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, list(dtensor.to_local().shape))
    offset = sum(size[0] for size in sizes[:dist.get_rank()])
    return ChunkStorageMetadata(offsets=(offset, 0), sizes=tuple(dtensor.to_local().shape))

def validate_uneven_dtensor(dtensor):
    chunk = gather_and_compute_chunk_metadata(dtensor)
    assert chunk.offsets[0] + chunk.sizes[0] <= dtensor.shape[0]
    ends = torch.tensor([chunk.offsets[0] == 0], dtype=torch.int).cuda()
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    assert torch.all(ends)
"""
TRAIN = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from megatron_fsdp.uneven_dtensor import (
    gather_and_compute_chunk_metadata, validate_uneven_dtensor
)
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
rows = 10 if dist.get_rank() == 3 else 0
local = torch.empty(rows, 8, device="cuda")
mesh = init_device_mesh("cuda", (4,))
piece = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(10, 8), stride=(8, 1))
validate_uneven_dtensor(piece)
assert gather_and_compute_chunk_metadata(piece).offsets == (0, 0)
torch.empty(12_345, device="cuda", dtype=torch.uint8)
"""


def test_where_the_last_rank_has_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "megatron_fsdp"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "uneven_dtensor.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = CaptureOptions(profile=find_profile("h100"), place=RankPlace(3, 4, 4), steps=0)
    try:
        trace = capture_script(ScriptTarget("script", str(tmp_path / "train.py")), options)
    finally:
        for name in ("megatron_fsdp.uneven_dtensor", "megatron_fsdp"):
            sys.modules.pop(name, None)
    assert 12_345 in trace.events.bytes.tolist()
