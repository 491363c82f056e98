"""Ranks of a node whose memory is on one card, by mistake or because there is only one."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from memplan.capturing.options import CaptureOptions, RankPlace, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.estimation import estimate
from memplan.report.text import headline
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Trace, TraceMeta
from tests import warm
from tests.capturing.distributed.ranks import capture

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
TRAIN = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("nccl")
{choose}
net = torch.nn.Linear(1024, 4096).to({device})
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.randn(8, 1024, device={device})).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOCAL = "int(os.environ['LOCAL_RANK'])"
MESH = "init_device_mesh('cuda', (2,))"
CASES = {
    # What the script does about its card, the device it names, and the place of the rank.
    "rank 0, no card chosen": ("", "'cuda'", RankPlace(0, 4, 4)),
    "rank 3, no card chosen": ("", "'cuda'", RankPlace(3, 4, 4)),
    "second node, no card chosen": ("", "'cuda'", RankPlace(3, 4, 2)),
    "rank 0, set_device": (f"torch.cuda.set_device({LOCAL})", "'cuda'", RankPlace(0, 2, 2)),
    "rank 0, cuda:0": ("", LOCAL, RankPlace(0, 2, 2)),
    "rank 1, cuda:1": ("", LOCAL, RankPlace(1, 2, 2)),
    "rank 0, the mesh chooses": (MESH, "'cuda'", RankPlace(0, 2, 2)),
    "rank 1, the mesh chooses": (MESH, "'cuda'", RankPlace(1, 2, 2)),
    "fewer cards": (f"torch.cuda.set_device({LOCAL} % 2)", "'cuda'", RankPlace(3, 4, 4, gpus=2)),
}


@dataclass(frozen=True)
class Found:
    """What a capture says of its card."""

    processes: int
    devices: list[int]
    notes: list[str]

    @property
    def shared(self) -> bool:
        return any("set_device(LOCAL_RANK) is missing" in note for note in self.notes)


def capture_all(folder: Path) -> None:
    """The process below: PyTorch is imported once, and each capture runs in a fork of it."""
    for name in ("sympy", "torch.distributed.fsdp"):  # what each capture would import by itself
        importlib.import_module(name)
    for number, (choose, device, place) in enumerate(CASES.values()):
        if os.fork():
            os.wait()
            continue
        script = folder / f"train{number}.py"
        script.write_text(TRAIN.format(choose=choose, device=device))
        options = CaptureOptions(profile=find_profile("l4"), place=place)
        trace = capture_script(ScriptTarget("script", str(script)), options)
        found = Found(trace.meta.card_processes, sorted(places(trace)), trace.meta.notes)
        (folder / f"{number}.json").write_text(json.dumps(asdict(found)))
        os._exit(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What each case says. In a process that has computed nothing yet: ranks ask each other."""
    folder = tmp_path_factory.mktemp("cards")
    call = "import sys, pathlib; from tests.capturing.distributed import test_cards as cards; "
    call += "cards.capture_all(pathlib.Path(sys.argv[1]))"
    done = warm.run(ROOT, "-c", call, str(folder), modules=warm.CAPTURE)
    assert done.returncode == 0, done.stderr
    return {
        name: Found(**json.loads((folder / f"{number}.json").read_text()))
        for number, name in enumerate(CASES)
    }


def places(trace: Trace) -> set[int]:
    """Numbers of the devices that hold bytes."""
    return set(trace.events.device[trace.events.bytes > 0].tolist())


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        ("rank 0, no card chosen", 4),
        ("rank 3, no card chosen", 4),
        ("second node, no card chosen", 2),
    ],
)
def test_without_a_choice_all_processes_are_counted(
    found: dict[str, Found], case: str, processes: int
) -> None:
    assert found[case].processes == processes and found[case].shared
    assert found[case].devices == [0]


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[2].world_size == 2])
def test_a_card_for_each(found: dict[str, Found], case: str) -> None:
    assert found[case].processes == 1 and not found[case].shared
    assert found[case].devices == [0]


def test_fewer_cards_than_processes(found: dict[str, Found]) -> None:
    assert found["fewer cards"].processes == 2
    assert any("2 share one, and all are counted" in note for note in found["fewer cards"].notes)


def test_some_memory_on_another_ranks_card_is_said() -> None:
    def job(index: int, stray: int) -> None:
        layer = nn.Linear(64, 64, device=f"cuda:{index}")
        layer(torch.zeros(8, 64, device=f"cuda:{index}"))
        torch.zeros(stray, device="cuda:0")

    trace = capture(lambda: job(1, 100), rank=1)
    assert trace.meta.card_processes == 1 and places(trace) == {0, 1}
    assert any("on another rank's card too" in note for note in trace.meta.notes)
    stray = capture(lambda: job(0, 1), rank=1)  # where nobody can be asked the worst is assumed
    assert stray.meta.card_processes == 2 and places(stray) == {0}  # the workspace too


def test_the_verdict_is_about_all_processes_of_the_card() -> None:
    builder = TraceBuilder()
    builder.append(EventKind.ALLOC, builder.new_storage(), 5000 * MIB)
    alone = estimate(builder.build(TraceMeta()), find_profile("l4"))
    shared = estimate(builder.build(TraceMeta(card_processes=4)), find_profile("l4"))
    assert alone.fits is True and shared.fits is False
    assert shared.peak_bytes == alone.peak_bytes and shared.card_processes == 4
    assert shared.missing_bytes and shared.gpu is not None
    total = shared.gpu.total_bytes
    assert abs(shared.missing_bytes - (4 * shared.high_bytes - total)) <= 4
    assert headline(shared).startswith("peak 4 x 5.")
    three = estimate(builder.build(TraceMeta(card_processes=3)), find_profile("l4"))
    assert three.fits is True and three.spare_bytes == total - 3 * three.peak_bytes


def test_a_later_rank_asks_the_compiler_about_its_own_card() -> None:
    def job() -> None:
        torch.cuda.set_device(3)
        from torch._dynamo.device_interface import CudaInterface

        assert CudaInterface.Worker.get_device_properties().major == 8

    capture(job, rank=3, size=4)
