"""`srun`: Slurm's launcher. Options as in its manual page; variables as its section OUTPUT
ENVIRONMENT VARIABLES names them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memplan.capturing.options import RankPlace
from memplan.cli.launchers.context import Context, Step, ranks_of_node
from memplan.cli.launchers.launch import Layer, World
from memplan.cli.launchers.options import Given, OptionTable, last, whole
from memplan.cli.launchers.python import assignments
from memplan.types.errors import UsageError

SRUN = OptionTable(
    "srun",
    values=(
        "-A|--account --accel-bind --acctg-freq --bb --bbf -b|--begin -c|--cpus-per-task"
        " -M|--clusters --cluster-constraint --comment -C|--constraint --container --container-id"
        " --container-image --container-mounts --container-workdir --container-name"
        " --container-save --container-env -S|--core-spec --cores-per-socket --cpu-bind --cpu-freq"
        " --cpus-per-gpu --deadline --delay-boot -d|--dependency -D|--chdir -e|--error --epilog"
        " --export --extra -B|--extra-node-info -x|--exclude --gid --gpu-bind --gpu-freq -G|--gpus"
        " --gpus-per-node --gpus-per-socket --gpus-per-task --gres --gres-flags --het-group --hint"
        " -i|--input -J|--job-name --jobid -L|--licenses --mail-type --mail-user --mcs-label --mem"
        " --mem-bind --mem-per-cpu --mem-per-gpu --mincpus --mpi --msg-timeout --network"
        " -F|--nodefile -w|--nodelist -N|--nodes -n|--ntasks --ntasks-per-core --ntasks-per-gpu"
        " --ntasks-per-node --ntasks-per-socket --open-mode -o|--output -p|--partition --power"
        " --prefer --priority --profile --prolog -q|--qos -r|--relative --reservation --signal"
        " --slurmd-debug --sockets-per-node --switches --task-epilog --task-prolog --thread-spec"
        " -T|--threads --threads-per-core -t|--time --time-min --tmp --treewidth --tres-bind"
        " --tres-per-task --uid -W|--wait --wckey -m|--distribution"
    ),
    flags=(
        "--contiguous -E|--preserve-env -H|--hold -l|--label -Q|--quiet -O|--overcommit"
        " -s|--oversubscribe --overlap --exact --external -u|--unbuffered -X|--disable-status"
        " -Z|--no-allocate --reboot --spread-job --stepmgr --test-only --use-min-nodes"
        " -v|--verbose --whole -V|--version --multi-prog --container-mount-home"
        " --no-container-mount-home --container-remap-root --no-container-remap-root"
        " --container-writable --container-readonly --container-entrypoint"
        " --no-container-entrypoint"
    ),
    attached=(
        "--bcast --bcast-exclude --compress --exclusive -I|--immediate -K|--kill-on-bad-exit"
        " -k|--no-kill --nice --propagate --pty --resv-ports --send-libs"
    ),
)


def read_srun(words: list[str], context: Context) -> Step:
    given, rest = SRUN.read(words)
    if "multi-prog" in given or "het-group" in given or ":" in rest:
        raise UsageError(
            "srun: several programs at once cannot be followed", "the command of one of them"
        )
    world, gpus = _world(given, context), _gpus_of_task(given)
    exported, notes = _exported(last(given, "export", "ALL"))
    layer = Layer(
        "srun",
        world,
        fixed={**exported, **_fixed(given, world)},
        ranked=lambda place: _ranked(place, gpus),
        module_option="",
        notes=notes,
    )
    return Step(layer, command=rest)


def _world(given: Given, context: Context) -> World:
    """How many tasks, on how many nodes: from options, else from what an allocation or the user
    has put in the environment."""
    nodes = _nodes(_said(given, "nodes", context, "SLURM_NNODES", "SLURM_JOB_NUM_NODES"))
    per_node = _said(given, "ntasks-per-node", context, "SLURM_NTASKS_PER_NODE")
    tasks = _said(given, "ntasks", context, "SLURM_NTASKS")
    local = whole("srun", "--ntasks-per-node", per_node) if per_node else None
    if not tasks and not per_node:
        tasks = _tasks_of_gpus(given, nodes or 1)
    if tasks:
        size = whole("srun", "--ntasks", tasks)
        if nodes and nodes <= size:
            # With both given, --ntasks-per-node is only the most that a node may get.
            local = -(-size // nodes)
        elif local is None:
            local = _gpus(given)
            local = min(local, size) if local else None
    else:
        size = (nodes or 1) * (local or 1)
        local = local or 1
    return World(size, ranks_of_node("srun", size, local, context))


def _said(given: Given, option: str, context: Context, *variables: str) -> str:
    found = (context.variable(name) for name in variables)
    return last(given, option) or next(filter(None, found), "")


def _nodes(text: str) -> int | None:
    """`2`, or the least of `2-4`: every rank of a sharded job then holds the largest share."""
    return whole("srun", "--nodes", text.partition("-")[0]) if text else None


def _gpus(given: Given) -> int | None:
    """GPUs of a node from `--gpus-per-node a100:8` or `--gres=gpu:8`."""
    generic = re.search(r"(?:^|,)gpu(?::[^,:]+)?:(\d+)", last(given, "gres"))
    if generic and not last(given, "gpus-per-node"):
        return whole("srun", "--gres", generic[1])
    return _number(given, "gpus-per-node")


def _number(given: Given, option: str) -> int | None:
    """The number of `8` or of `a100:8`; None where the option is not given."""
    text = last(given, option).rpartition(":")[2]
    return whole("srun", f"--{option}", text) if text else None


def _tasks_of_gpus(given: Given, nodes: int) -> str:
    """The number of tasks where it follows from that of the GPUs; empty where it does not."""
    per_gpu, per_task = _number(given, "ntasks-per-gpu"), _number(given, "gpus-per-task")
    gpus = _number(given, "gpus") or nodes * (_gpus(given) or 0)
    if per_gpu and gpus:
        return str(gpus * per_gpu)
    if per_task and last(given, "gpus"):
        return str(max(gpus // per_task, 1))
    return ""


def _gpus_of_task(given: Given) -> int | None:
    """How many GPUs a task sees where it does not see all of its node's.

    Asking for GPUs by the task, or for tasks by the GPU, binds each to its own unless `--gpu-bind`
    says otherwise. Raises UsageError for several tasks on one GPU.
    """
    per_gpu = _number(given, "ntasks-per-gpu")
    if per_gpu is not None and per_gpu > 1:
        raise UsageError(
            f"srun --ntasks-per-gpu {per_gpu}: what several tasks need of one GPU together cannot "
            "be estimated",
            "--ntasks-per-gpu 1",
        )
    kind, _, count = last(given, "gpu-bind").removeprefix("verbose,").partition(":")
    if kind == "per_task":
        return whole("srun", "--gpu-bind per_task", count)
    if kind in ("single", "map_gpu"):
        return 1
    if kind:
        return None
    return per_gpu or _number(given, "gpus-per-task")


def _exported(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables that `--export=ALL,A=B` sets."""
    words = text.split(",")
    step = assignments([word for word in words if "=" in word])
    if "ALL" in words:
        return dict(step.layer.fixed), ()
    return dict(step.layer.fixed), (
        f"srun --export={text}: the capture finds this shell's other variables all the same",
    )


def _fixed(given: Given, world: World) -> dict[str, str]:
    tasks = f"{world.local_size}(x{world.nodes})" if world.nodes > 1 else str(world.local_size)
    names = f"node[0-{world.nodes - 1}]" if world.nodes > 1 else "node0"
    found = dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(world.size))
    found |= dict.fromkeys(
        ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), str(world.nodes)
    )
    found |= dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), tasks)
    found |= dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), names)
    found |= {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_STEP_ID": "0"}
    found |= {
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_NTASKS_PER_NODE": str(world.local_size),
    }
    for option, variable in (
        ("cpus-per-task", "SLURM_CPUS_PER_TASK"),
        ("gpus-per-node", "SLURM_GPUS_PER_NODE"),
        ("gpus-per-task", "SLURM_GPUS_PER_TASK"),
        ("job-name", "SLURM_JOB_NAME"),
    ):
        if value := last(given, option):
            found[variable] = value
    if gpus := _gpus(given):
        found["SLURM_GPUS_ON_NODE"] = str(gpus)
    return found


def _ranked(place: RankPlace, gpus: int | None) -> Mapping[str, str]:
    # Below a control group that leaves a task its own GPUs only, they count from 0 on.
    own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))} if gpus else {}
    return own | {
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node),
        "SLURMD_NODENAME": f"node{place.node}",
    }
