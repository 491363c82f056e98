"""`mpirun` and `mpiexec`, of Open MPI and of the MPICH family (Intel MPI, MVAPICH): which one is
meant is not known, so the options of both are read and the variables of both are set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from memplan.capturing.options import RankPlace
from memplan.cli.launchers.context import Context, Step, ranks_of_node
from memplan.cli.launchers.launch import Layer, World
from memplan.cli.launchers.options import Given, OptionTable, last, whole
from memplan.types.errors import UsageError

MPIRUN = OptionTable(
    "mpirun",
    values=(
        "--np|-np|-n|--n|-c --host|-host|-H|-hosts"
        " --hostfile|-hostfile|--machinefile|-machinefile|-f"
        " --npernode|-npernode|-N|-ppn|--ppn|-perhost --npersocket|-npersocket --map-by|-map-by"
        " --bind-to|-bind-to --rank-by|-rank-by -x --wdir|-wdir|-wd --path|-path --prefix|-prefix"
        " --output-filename --output --timeout --report-uri --rankfile|-rf --cpu-set --cpu-list"
        " --stdin --personality --tune -am --xterm --preload-files --display --runtime-options"
        " -genvlist -envlist -launcher -rmk -iface -bootstrap -prepend-rank -configfile"
    ),
    flags=(
        "--allow-run-as-root --oversubscribe|-oversubscribe --nooversubscribe --report-bindings"
        " --display-map --display-allocation --display-topo --tag-output|-tag-output"
        " --timestamp-output --bynode --bycore --byslot --pernode|-pernode -v|--verbose|-verbose"
        " -q|--quiet --use-hwthread-cpus --enable-recovery --continuous -d --debug-daemons"
        " --nolocal --novm --merge-stderr-to-stdout --get-stack-traces -genvall -envall -l"
        " -print-rank-map"
    ),
    pairs=("--mca|-mca --gmca|-gmca --prtemca|-prtemca --pmixmca|-pmixmca -genv -env"),
    long=True,
)


def read_mpirun(words: list[str], context: Context) -> Step:
    given, rest = MPIRUN.read(words)
    if "configfile" in given or ":" in rest:
        raise UsageError(
            "mpirun: several programs at once cannot be followed", "the command of one of them"
        )
    world = _world(given, context)
    layer = Layer(
        "mpirun",
        world,
        fixed={**_exported(given), **_fixed(world)},
        ranked=_ranked,
        module_option="",
    )
    return Step(layer, command=rest)


def _world(given: Given, context: Context) -> World:
    slots = _slots(given)
    mapped = re.match(r"ppr:(\d+):node", last(given, "map-by"))
    per_node = last(given, "npernode") or (mapped[1] if mapped else "")
    local = whole("mpirun", "-N", per_node) if per_node else None
    local = 1 if "pernode" in given else local
    text = last(given, "np")
    if local is None and slots:
        local = _alike(slots, whole("mpirun", "-np", text) if text else sum(slots))
    if text:
        size = whole("mpirun", "-np", text)
        local = min(local, size) if local else None
    elif slots:
        size = len(slots) * local if per_node and local else sum(slots)
    else:
        raise UsageError(
            "mpirun: without -np it starts one process a core, and the machine is not known here",
            "mpirun -np 8",
        )
    return World(size, ranks_of_node("mpirun", size, local, context))


def _slots(given: Given) -> list[int]:
    """Slots of each host that is named: `--host a:8,b:8`, or a file with `a slots=8` or `a:8`."""
    if hosts := last(given, "host"):
        found = re.findall(r"[^,:]+(?::(\d+))?(?:,|$)", hosts)
        return [int(count or 1) for count in found]
    path = last(given, "hostfile")
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"mpirun: {path} cannot be read ({error})", "-np 8 -N 4") from error
    hosts_named = [line.split("#")[0].strip() for line in lines]
    matches = [re.search(r"(?:slots\s*=\s*|:)(\d+)", line) for line in hosts_named if line]
    return [int(match[1]) if match else 1 for match in matches]


def _alike(slots: list[int], size: int) -> int | None:
    """Processes on each node, where `size` of them fill one host after the other; None where the
    hosts are too few for them. Raises UsageError when the nodes would not be alike."""
    filled, left = [], size
    for count in slots:
        filled.append(min(count, left))
        left -= filled[-1]
    filled = [count for count in filled if count]
    if left or not filled:
        return slots[0] if len(set(slots)) == 1 else None
    if len(set(filled)) > 1:
        raise UsageError(
            f"mpirun: nodes with {', '.join(map(str, filled))} processes are not alike",
            f"memplan estimate --world-size {size} --gpus-per-node N and the script, without "
            "mpirun, for any N that divides it: a rank's own memory hardly depends on its node",
        )
    return filled[0]


def _exported(given: Given) -> dict[str, str]:
    """Variables set by `-x NAME=VALUE` and by `-genv NAME VALUE`."""
    words = [*given.get("x", []), *given.get("genv", []), *given.get("env", [])]
    return dict(word.split("=", 1) for word in words if "=" in word)


def _fixed(world: World) -> dict[str, str]:
    size, local = str(world.size), str(world.local_size)
    return {
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local,
        "OMPI_UNIVERSE_SIZE": size,
        "PMI_SIZE": size,
        "MPI_LOCALNRANKS": local,
    }


def _ranked(place: RankPlace) -> Mapping[str, str]:
    rank, local = str(place.rank), str(place.local_rank)
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": local,
        "OMPI_COMM_WORLD_NODE_RANK": local,
        "PMIX_RANK": rank,
        "PMI_RANK": rank,
        "MPI_LOCALRANKID": local,
    }
