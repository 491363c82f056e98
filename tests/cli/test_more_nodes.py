"""A launcher's command with more nodes."""

from __future__ import annotations

import shlex

import pytest

from memplan.cli.launchers.launch import World
from memplan.cli.launchers.more_nodes import with_more_nodes
from tests.cli.test_launchers import read

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.mark.parametrize(
    ("line", "wider"),
    [
        (
            "torchrun --nnodes 8 --nproc-per-node 8 train.py",
            "torchrun --nnodes 16 --nproc-per-node 8 train.py",
        ),
        (
            "torchrun --nproc-per-node=4 train.py --nnodes 1",
            "torchrun --nnodes 2 --nproc-per-node=4 train.py --nnodes 1",
        ),
        (
            "torchrun --standalone --nproc_per_node 4 -m pkg.train",
            "torchrun --nnodes 2 --nproc_per_node 4 -m pkg.train",
        ),
        (
            "-m torch.distributed.run --nnodes=2 train.py",
            "-m torch.distributed.run --nnodes=4 train.py",
        ),
        (
            "nice -n 5 srun -N 2 torchrun --nnodes 2 t.py",
            "nice -n 5 srun -N 4 torchrun --nnodes 4 t.py",
        ),
        (
            "srun -N 2 -n 16 python train.py",
            "srun -N 4 -n 32 python train.py",
        ),
        (
            "mpirun -np 8 -N 4 python train.py",
            "mpirun -np 16 -N 4 python train.py",
        ),
    ],
)
def test_the_same_job_on_more_nodes(line: str, wider: str) -> None:
    launch = read(line)
    found = with_more_nodes(launch, 2)
    assert found is not None and launch.world is not None
    assert shlex.join(found.words()) == wider
    assert found.world == World(2 * launch.world.size, launch.world.local_size)
    assert found.target == launch.target


@pytest.mark.parametrize("line", ["train.py", "mpirun --host a:4,b:4 python train.py"])
def test_a_job_whose_nodes_are_not_counted_stays(line: str) -> None:
    assert with_more_nodes(read(line), 2) is None
