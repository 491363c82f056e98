"""`deepspeed`: DeepSpeed's runner. Options as in `deepspeed/launcher/runner.py`; environment and
the `--local_rank` argument as in `deepspeed/launcher/launch.py`, which it starts on each node.

Read from a table: its own parser comes with the whole package, which is absent on many machines
without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from memplan.capturing.options import RankPlace
from memplan.cli.launchers.context import Context, Step
from memplan.cli.launchers.launch import Layer, World
from memplan.cli.launchers.options import Given, OptionTable, last, whole
from memplan.types.errors import UsageError

_HOSTFILE = "/job/hostfile"
DEEPSPEED = OptionTable(
    "deepspeed",
    values=(
        "-H|--hostfile -i|--include -e|--exclude --num_nodes --min_elastic_nodes"
        " --max_elastic_nodes --num_gpus|--num_accelerators --master_port --master_addr"
        " --node_rank --launcher --launcher_args --enable_each_rank_log --autotuning --comment"
        " --account --bind_core_list --ssh_port --log_level --venv_script"
    ),
    flags=(
        "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid"
        " --elastic_training --bind_cores_to_rank -q|--quiet"
    ),
)


def read_deepspeed(words: list[str], context: Context) -> Step:
    given, rest = DEEPSPEED.read(words)
    if "autotuning" in given:
        raise UsageError(
            "deepspeed --autotuning starts many jobs, one after the other", "leave it out"
        )
    nodes = _nodes(given, context)
    sizes = {len(slots) for slots in nodes}
    if len(sizes) != 1 or 0 in sizes:
        raise UsageError(
            f"deepspeed: nodes with {', '.join(str(len(slots)) for slots in nodes)} GPUs are not "
            "alike",
            "--num_gpus 8, or the same number of slots on each node; or memplan estimate "
            f"--world-size {sum(map(len, nodes))} --gpus-per-node N and the script, without "
            "deepspeed: a rank's own memory hardly depends on its node",
        )
    world = World(len(nodes) * sizes.pop(), len(nodes[0]))
    layer = Layer(
        "deepspeed",
        world,
        fixed=_fixed(given, world),
        ranked=lambda place: _ranked(place, nodes),
        rank_option="" if "no_local_rank" in given else "--local_rank",
        no_rank_option="--no_local_rank",
        module_option="--module",
    )
    if "no_python" in given:
        return Step(layer, command=rest)
    return Step(layer, program=rest, is_module="module" in given)


def _nodes(given: Given, context: Context) -> list[list[int]]:
    """The GPUs used on each node."""
    gpus = last(given, "num_gpus")
    count = last(given, "num_nodes")
    filtered = last(given, "include") or last(given, "exclude")
    if filtered and (gpus or count):
        raise UsageError(
            "deepspeed: --num_gpus and --num_nodes do not go with --include and --exclude",
            "one or the other",
        )
    wanted = whole("deepspeed", "--num_nodes", count) if count else None
    if gpus:
        slots = list(range(whole("deepspeed", "--num_gpus", gpus)))
        return [slots] * (wanted or len(_hosts(given)) or 1)
    hosts = _hosts(given)
    if filtered:
        return _filtered(given, hosts, context)
    if hosts:
        return [list(range(slots)) for slots in hosts.values()][:wanted]
    found = context.gpus("deepspeed without --num_gpus", "--num_gpus 8")
    return [list(range(found))] * (wanted or 1)


def _hosts(given: Given) -> dict[str, int]:
    """Slots by host from the host file; empty without one."""
    path = Path(last(given, "hostfile", _HOSTFILE))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}  # deepspeed then goes on with the machine it is on
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"deepspeed: {path} cannot be read ({error})", "--num_gpus 8") from error
    found: dict[str, int] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        match = re.match(r"(\S+)\s+slots=(\d+)", line)
        if match is None:
            raise UsageError(f"deepspeed: {path} has the line {line!r}", "worker-0 slots=8")
        found[match[1]] = int(match[2])
    return found


def _filtered(given: Given, hosts: dict[str, int], context: Context) -> list[list[int]]:
    """`worker-0@worker-1:0,2`: all GPUs of the one, two of the other."""
    include, exclude = last(given, "include"), last(given, "exclude")
    if include and exclude:
        raise UsageError("deepspeed: --include and --exclude exclude each other", "one of them")

    def slots_of(host: str) -> list[int]:
        if host in hosts:
            return list(range(hosts[host]))
        return list(
            range(context.gpus(f"deepspeed: {host}, which no host file names,", f"{host}:0,1"))
        )

    named: dict[str, list[int]] = {}
    for part in (include or exclude).split("@"):
        host, colon, listed = part.partition(":")
        if colon and not re.fullmatch(r"\d+(,\d+)*", listed):
            raise UsageError(f"deepspeed: {part!r} names no GPUs", "localhost:0,1")
        slots = sorted({int(n) for n in listed.split(",")}) if colon else slots_of(host)
        named[host] = sorted({*named.get(host, []), *slots})
    if include:
        return list(named.values())
    kept = {host: slots_of(host) for host in (hosts or dict.fromkeys(named, 0))}
    left = [[n for n in slots if n not in named.get(host, [])] for host, slots in kept.items()]
    return [slots for slots in left if slots] or [[]]


def _fixed(given: Given, world: World) -> dict[str, str]:
    return {
        "MASTER_ADDR": last(given, "master_addr", "127.0.0.1"),
        "MASTER_PORT": last(given, "master_port", "29500"),
        "CROSS_SIZE": str(world.nodes),
        "LOCAL_SIZE": str(world.local_size),
    }


def _ranked(place: RankPlace, nodes: list[list[int]]) -> Mapping[str, str]:
    return {
        "CROSS_RANK": str(place.node),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, nodes[place.node])),
    }
