"""Launchers' commands, read as users type them."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import pytest

from memplan.capturing.options import RankPlace, ScriptTarget
from memplan.cli import main
from memplan.cli.job import MOST_LOCAL, Job, add_job_options, read_job
from memplan.cli.launchers.by_hand import world_by_hand
from memplan.cli.launchers.launch import Launch, World
from memplan.cli.launchers.read import read_launch
from memplan.cli.program import split_program
from memplan.types.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


pytestmark = pytest.mark.usefixtures("no_settings")


def read(line: str, gpus_per_node: int | None = None) -> Launch:
    name, *argv = shlex.split(line)
    if name == "-m":
        return read_launch(ScriptTarget("module", argv[0], tuple(argv[1:])), gpus_per_node)
    return read_launch(ScriptTarget("script", name, tuple(argv)), gpus_per_node)


@pytest.mark.parametrize(
    ("line", "world", "program"),
    [
        ("train.py --x 1", None, "train.py --x 1"),
        ("-m pkg.train a", None, "-m pkg.train a"),
        ("python -u -X dev -W ignore train.py -m x", None, "train.py -m x"),
        ("/opt/venv/bin/python3.12 -um pkg.train -c", None, "-m pkg.train -c"),
        ("env A=1 B=2 python train.py", None, "train.py"),
        ("A=1 torchrun train.py", (1, 1), "train.py"),
        ("torchrun --nproc-per-node 8 train.py --lr 1", (8, 8), "train.py --lr 1"),
        ("torchrun --nproc_per_node=4 --nnodes=2 train.py --nnodes 3", (8, 4),
         "train.py --nnodes 3"),
        ("torchrun --nproc-p 2 --standalone -m pkg.train -m y", (2, 2), "-m pkg.train -m y"),
        ("torchrun -m --nproc-per-node 2 pkg.train", (2, 2), "-m pkg.train"),
        ("torchrun -r 3 -t0:1,1:2 --nproc-per-node 2 -- train.py", (2, 2), "train.py"),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 train.py", (2, 2), "train.py"),
        ("torchrun --nproc-per-node 2 --no-python python -u train.py", (2, 2), "train.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", (2, 2), "train.py"),
        ("-m torch.distributed.run --nproc-per-node 2 train.py", (2, 2), "train.py"),
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py a", (2, 2),
         "train.py --local-rank=1 a"),
        ("python -m torch.distributed.launch --use-env --nproc_per_node 2 train.py", (2, 2),
         "train.py"),
        ("deepspeed --num_gpus 4 train.py --x", (4, 4), "train.py --local_rank=3 --x"),
        ("deepspeed --num_nodes=2 --num_gpus=4 --no_local_rank train.py", (8, 4), "train.py"),
        ("deepspeed --include localhost:1,3 --module pkg.train", (2, 2),
         "-m pkg.train --local_rank=1"),
        ("deepspeed -i a:0,1@b:0,1 --no_local_rank train.py", (4, 2), "train.py"),
        ("srun -N 2 --ntasks-per-node 8 env X=Y python train.py", (16, 8), "train.py"),
        ("srun -n16 -N2 -p gpu --exclusive --gres=gpu:a100:8 python train.py", (16, 8), "train.py"),
        ("srun -n 4 --gpus-per-node=h100:2 ./train.py", (4, 2), "./train.py"),
        ("srun --gpus=a100:8 --ntasks-per-gpu=1 python train.py", (8, 8), "train.py"),
        ("srun -G 4 --gpus-per-task=2 python train.py", (2, 2), "train.py"),
        ("srun -N 2 --gpus-per-node=8 --ntasks-per-gpu=1 python train.py", (16, 8), "train.py"),
        ("srun -lu --kill-on-bad-exit=1 --mpi=pmix -n 2 python train.py", (2, 2), "train.py"),
        ("srun -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 train.py", (16, 8),
         "train.py"),
        ("mpirun -np 8 --mca btl ^openib -x A=1 python train.py", (8, 8), "train.py"),
        ("mpirun -np 8 -npernode 4 python train.py", (8, 4), "train.py"),
        ("mpirun -H a:2,b:2 -np 4 python -m pkg.train", (4, 2), "-m pkg.train"),
        ("mpiexec -n 16 -ppn 8 -genv A 1 python train.py", (16, 8), "train.py"),
        ("mpirun -np 16 --map-by ppr:4:node python train.py", (16, 4), "train.py"),
        ("nohup python train.py --x", None, "train.py --x"),
        ("nice -n 10 nohup train.py", None, "train.py"),
        ("nice -10 ionice -c2 -n 7 python train.py", None, "train.py"),
        ("env A=b time -v -o log python -m pkg.train -v", None, "-m pkg.train -v"),
        ("taskset -c 0-7 python train.py", None, "train.py"),
        ("taskset 0xff torchrun --nproc-per-node 2 train.py", (2, 2), "train.py"),
        ("stdbuf -oL -eL python -u train.py -o x", None, "train.py -o x"),
        ("timeout -k 5 --signal=INT 2h setsid -w chrt -r 5 train.py", None, "train.py"),
        ("time numactl --cpunodebind=0 -m 0 -l nice python -m torch.distributed.run"
         " --nproc-per-node 4 train.py --nice", (4, 4), "train.py --nice"),
        ("srun -n 2 numactl --interleave all python train.py", (2, 2), "train.py"),
        ("./nohup train.py", None, "./nohup train.py"),
        ("./bin/torchrun --nproc-per-node 2 train.py", (2, 2), "train.py"),
    ],
)  # fmt: skip
def test_what_is_run(line: str, world: tuple[int, int] | None, program: str) -> None:
    launch = read(line)
    assert launch.world == (World(*world) if world else None)
    place = launch.world.place(launch.world.size - 1) if launch.world else None
    target = launch.target
    assert [
        *(["-m"] if target.kind == "module" else []),
        target.name,
        *launch.arguments(place),
        *target.argv,
    ] == program.split()
    again = launch.words()
    assert again == shlex.split(line)


@pytest.mark.parametrize(
    ("line", "place", "expected"),
    [
        ("env A=1 torchrun --nproc-per-node 2 train.py", (1, 2, 2),
         {"A": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}),
        ("torchrun --nproc-per-node 2 --virtual-local-rank train.py", (1, 2, 2),
         {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}),
        ("torchrun --max-restarts 3 --role trainer --master-port 1 train.py", (0, 1, 1),
         {"TORCHELASTIC_MAX_RESTARTS": "3", "ROLE_NAME": "trainer", "MASTER_PORT": "1"}),
        ("deepspeed --include localhost:1,3 train.py", (1, 2, 2),
         {"CUDA_VISIBLE_DEVICES": "1,3", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}),
        ("srun -N 2 --ntasks-per-node 4 --export=ALL,A=1 env B=2 python train.py", (5, 8, 4),
         {"A": "1", "B": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
          "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}),
        ("srun -n 2 --gpus-per-task=1 python train.py", (1, 2, 2), {"CUDA_VISIBLE_DEVICES": "0"}),
        ("srun -n 2 --gpus-per-node=2 --gpu-bind=single:1 python train.py", (1, 2, 2),
         {"CUDA_VISIBLE_DEVICES": "0"}),
        ("srun -n 2 --gpus-per-task=1 --gpu-bind=none python train.py", (1, 2, 2),
         {"CUDA_VISIBLE_DEVICES": None}),
        # Below srun torchrun runs once on each node: its workers share the node's SLURM_PROCID.
        ("srun -N 2 -n 2 torchrun --nnodes 2 --nproc-per-node 4 train.py", (5, 8, 4),
         {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "ROLE_RANK": "5"}),
        ("mpirun -np 4 -N 2 -x A=1 python train.py", (3, 4, 2),
         {"A": "1", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}),
    ],
)  # fmt: skip
def test_what_a_rank_finds(
    line: str, place: tuple[int, int, int], expected: dict[str, str | None]
) -> None:
    found = read(line).environment(RankPlace(*place))
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("torchrun --nproc-per-node 8", "torchrun: no script given", "torchrun … train.py"),
        ("torchrun --nproc-per-node", "--nproc-per-node needs a value", "torchrun --help"),
        ("torchrun --nproc-per-nod3 8 train.py", "no option --nproc-per-nod3", "--nproc-per-node"),
        ("torchrun --nproc-per-node 0 train.py", "'0' is not a whole number from 1", "8"),
        ("torchrun --nproc-per-node gpu train.py", "not known here", "--gpus-per-node 8"),
        ("torchrun --nnodes 4:2 train.py", "--nnodes 4:2 is no range", "2:4"),
        ("torchrun --standalone=1 train.py", "--standalone takes no value", "--standalone"),
        ("deepspeed train.py", "not known here", "--num_gpus 8"),
        ("deepspeed --num_gpus 2 --include localhost:0 train.py", "do not go with", "one or"),
        ("deepspeed --include a:0@b:0,1 train.py", "nodes with 1, 2 GPUs are not alike", "slots"),
        ("srun -N 3 -n 8 python train.py", "8 processes do not divide into nodes of 3", "of 3"),
        ("srun -n 12 python train.py", "12 processes do not divide", "--gpus-per-node 6"),
        ("srun -N 4 torchrun --nnodes 2 --nproc-per-node 8 train.py",
         "srun starts torchrun 4 times", "the same number of nodes"),
        ("srun -n 8 --ntasks-per-gpu=2 python train.py", "several tasks need of one GPU", "1"),
        ("uv run torchrun --nproc-per-node 2 train.py", "uv run brings a Python of its own",
         "uv run … memplan estimate"),
        ("srun -n 2 singularity exec image.sif python train.py", "singularity exec", "inside it"),
        ("srun -n 2 bash run.sh", "what a shell would run cannot be followed", "the command"),
        ("mpirun python train.py", "without -np", "mpirun -np 8"),
        ("mpirun --nope 1 python train.py", "mpirun: no option --nope", ""),
        ("python -c pass", "python -c", "script"),
        ("env -u A python train.py", "env --unset", "shell"),
        ("accelerate config", "accelerate config starts no training", "accelerate launch"),
        ("nohup", "nohup: no script given", "nohup … train.py"),
        ("taskset -c 0-7", "taskset: no script given", ""),
        ("taskset ff", "taskset: no script given", ""),
        ("taskset -p 123", "taskset: no script given", ""),
        ("numactl --hardware", "numactl: no script given", ""),
        ("torchrun --rank 3 --nproc-per-node 8 train.py", "torchrun: no option --rank",
         "--rank before torchrun, where memplan's own options stand"),
        ("srun --maximize=batch python train.py", "srun: no option --maximize",
         "memplan estimate --maximize … srun …"),
    ],
)  # fmt: skip
def test_what_is_refused(line: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mpirun --hostfile hosts python train.py", "nodes with 8, 8, 4 processes are not alike"),
        ("mpirun -np 12 --hostfile hosts python train.py", "nodes with 8, 4 processes"),
        ("mpirun -np 16 --hostfile hosts python train.py", "16 processes (2 nodes of 8)"),
        ("mpirun -np 12 -N 4 --hostfile hosts python train.py", "12 processes (3 nodes of 4)"),
        ("deepspeed --hostfile hosts train.py", "nodes with 8, 8, 4 GPUs are not alike"),
        ("deepspeed --hostfile hosts --num_nodes 2 train.py", "16 processes (2 nodes of 8)"),
    ],
)
def test_hosts_with_unlike_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=8\nb slots=8\nc slots=4\n")
    try:
        answer = str(read(line).world)
    except UsageError as error:
        answer = error.message
        assert "--gpus-per-node N" in error.hint
    assert said in answer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--world-size 12 train.py", "--world-size 12 does not divide into nodes of 8 GPUs"),
        ("--world-size 4 --rank 4 train.py", "--rank 4: the job has 4 ranks, counted from 0"),
        ("--rank 3 train.py", "--rank 3 of a job of one process"),
        ("--gpus-per-node 3 train.py", "--gpus-per-node 3 of a job of one process"),
        ("--world-size 0 train.py", "'0' is not a number from 1 on"),
        ("--world-size 4 --rank x train.py", "'x' is not the number of a rank"),
        ("--world-size 4 torchrun --nproc-per-node 8 train.py",
         "--world-size 4, but torchrun starts 8 processes"),
        ("--gpus-per-node 4 torchrun --nproc-per-node 8 train.py",
         "--gpus-per-node 4, but torchrun starts 8 processes"),
        ("--world-size 8 srun -N 2 --ntasks-per-node 8 python train.py",
         "--world-size 8, but srun starts 16 processes (2 nodes of 8)"),
        ("--world-size 64 --gpus-per-node 32 train.py",
         "64 processes (2 nodes of 32): at most 16 processes in a node can be captured"),
        ("torchrun --nproc-per-node 17 train.py",
         "17 processes: at most 16 processes in a node can be captured"),
        ("nohup horovodrun -np 8 train.py", "no script horovodrun"),
        ("nice -n 10 ionice -c idle horovodrun -np 8 train.py", "no script horovodrun"),
        ("time -v sleep 5 train.py", "no script sleep"),
        ("sleep 5", "if sleep is a program that starts one, what it starts: python train.py"),
        ("--rank 8 torchrun --nproc-per-node 8 train.py", "--rank 8: the job has 8 ranks"),
        ("torchrun --nproc-per-node 8 trian.py", "no script trian.py"),
        ("torchrun -m --nproc-per-node 8 nosuchmodule", "no module nosuchmodule"),
    ],
)  # fmt: skip
def test_ranks_that_contradict(
    line: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["estimate", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_gpus_per_node_answers_for_words_that_count_gpus() -> None:
    assert read("torchrun --nnodes 2 --nproc-per-node gpu train.py", 4).world == World(8, 4)
    assert read("deepspeed train.py", 4).world == World(4, 4)
    assert read("srun -n 12 python train.py", 6).world == World(12, 6)


def test_an_allocation_and_a_job_description_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert read("srun python train.py").world == World(8, 4)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    assert read("torchrun train.py").world == World(2, 2)


@pytest.mark.parametrize(
    ("line", "below"),
    [
        ("train.py a", "memplan run train.py a"),
        ("-m pkg a", "memplan run -m pkg a"),
        ("nohup ./train.py", "nohup python -m memplan run ./train.py"),
        ("taskset -c 0 python train.py", "taskset -c 0 python -m memplan run train.py"),
        ("torchrun --nproc-per-node 2 train.py",
         "torchrun --nproc-per-node 2 -m memplan run train.py"),
        ("torchrun -m --nproc-per-node 2 pkg", "torchrun -m --nproc-per-node 2 memplan run -m pkg"),
        ("srun -n 2 python -u train.py", "srun -n 2 python -u -m memplan run train.py"),
        ("srun -n 2 ./train.py", "srun -n 2 python -m memplan run ./train.py"),
        ("deepspeed --num_gpus 2 train.py",
         "deepspeed --num_gpus 2 --no_local_rank --module memplan run train.py"),
    ],
)  # fmt: skip
def test_a_command_of_ours_below_the_launcher(line: str, below: str) -> None:
    assert read(line).words_below("memplan", "run") == below.split()


# Ranks started by hand


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("RANK=3 WORLD_SIZE=8", (8, 8, 3)),
        ("RANK=3 WORLD_SIZE=8 LOCAL_RANK=3", (8, 8, 3)),
        ("RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", (16, 4, 9)),
        ("RANK=3 WORLD_SIZE=6 LOCAL_RANK=0", (6, 3, 3)),
        ("RANK=5 WORLD_SIZE=7 LOCAL_RANK=0", (7, 1, 5)),
        ("RANK=0 WORLD_SIZE=12", (12, 6, 0)),
        ("WORLD_SIZE=8", None),
        ("RANK=1", None),
        ("RANK= WORLD_SIZE=", None),
    ],
)
def test_ranks_of_the_environment(line: str, found: tuple[int, int, int] | None) -> None:
    answer = world_by_hand(dict(word.split("=") for word in line.split()))
    expected = None if found is None else (World(found[0], found[1]), found[2])
    assert answer == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("RANK=8 WORLD_SIZE=8", "WORLD_SIZE=8 has ranks 0 to 7"),
        ("RANK=x WORLD_SIZE=8", "RANK=x of the environment is not a whole number"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0"),
        ("RANK=1 WORLD_SIZE=8 LOCAL_RANK=5", "no nodes alike have such a rank"),
        ("RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=3", "no nodes alike have such a rank"),
    ],
)
def test_ranks_that_no_launcher_would_set(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        world_by_hand(dict(word.split("=") for word in line.split()))
    assert caught.value.hint


def job(line: str) -> Job:
    parser = argparse.ArgumentParser()
    add_job_options(parser, several_ranks=True)
    own, program = split_program(parser, shlex.split(line))
    args = parser.parse_args(own)
    args.program = program
    return read_job(args, "usage")


def test_which_rank_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert job("train.py").place is None
    by_hand = job("RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 python train.py")
    assert by_hand.place == RankPlace(3, 8, 8)
    assert any("RANK=3 WORLD_SIZE=8 of the environment" in note for note in by_hand.notes)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert job("train.py").rank == 3
    assert job("--rank 5 train.py").rank == 5
    assert job("--rank all train.py").rank is None
    assert job("--world-size 4 train.py").place == RankPlace(0, 4, 4)
    assert job("torchrun --nproc-per-node 2 train.py").rank is None


def test_a_rank_alone_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert "--rank 4 another" in job("--world-size 8 train.py").notes[-1]
    assert not job("--world-size 8 --rank 0 train.py").notes


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        (None, None),
        ("", None),
        ("-1", None),
        ("0", 1),
        ("2,3", 2),
        ("0,-1,1", 1),
        ("GPU-a,MIG-b", 2),
    ],
)
def test_gpus_that_a_node_s_processes_see(
    named: str | None, gpus: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    place = job("--world-size 4 train.py").place
    assert place == RankPlace(0, 4, 4, gpus)
    own = job("torchrun --nproc-per-node 4 --virtual-local-rank train.py").place
    assert own is not None and own.gpus is None
    alone = " ".join(job("train.py").notes)
    assert ("captured with one" in alone) == (named is not None and gpus != 1)


def test_the_most_processes_of_a_node() -> None:
    from memplan.capturing.cuda.device import MAX_DEVICES

    assert MOST_LOCAL == MAX_DEVICES
