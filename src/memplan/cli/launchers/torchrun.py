"""`torchrun`, `python -m torch.distributed.run` and `python -m torch.distributed.launch`.

The options are those of `torch.distributed.run.get_args_parser`; reading them here saves the
seconds that importing torch takes. The environment is that of
`torch.distributed.elastic.agent.server.local_elastic_agent`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from memplan.capturing.options import RankPlace
from memplan.cli.launchers.context import Context, Step
from memplan.cli.launchers.launch import Layer, World
from memplan.cli.launchers.options import Given, OptionTable, last, whole
from memplan.types.errors import UsageError

VALUES = (
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf"
    " --max-restarts --monitor-interval --start-method --event-log-handler --role --log-dir"
    " -r|--redirects -t|--tee --local-ranks-filter --duplicate-stdout-filters"
    " --duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr --logs-specs"
    " --numa-binding --signals-to-handle --shutdown-timeout"
)
FLAGS = "--standalone -m|--module --no-python --run-path --virtual-local-rank"
TORCHRUN = OptionTable("torchrun", values=VALUES, flags=FLAGS, underscores=True)
LAUNCH = OptionTable(
    "torch.distributed.launch", values=VALUES, flags=f"{FLAGS} --use-env", underscores=True
)
_DEVICE_WORDS = ("gpu", "auto", "cuda")


def read_torchrun(words: list[str], context: Context) -> Step:
    return _read(TORCHRUN, words, context)


def read_launch_module(words: list[str], context: Context) -> Step:
    return _read(LAUNCH, words, context)


def _read(table: OptionTable, words: list[str], context: Context) -> Step:
    given, rest = table.read(words)
    name = table.launcher
    nodes, notes = _nodes(name, _said(given, "nnodes", context) or "1")
    local = _processes(name, _said(given, "nproc-per-node", context) or "1", context)
    world = World(nodes * local, local)
    legacy = table is LAUNCH and "use-env" not in given
    layer = Layer(
        name,
        world,
        fixed=_fixed(given, world, context),
        ranked=ranked_environment(virtual="virtual-local-rank" in given),
        rank_option="--local-rank" if legacy else "",
        no_rank_option="--use-env",
        notes=notes,
    )
    if "no-python" in given:
        return Step(layer, command=rest)
    return Step(layer, program=rest, is_module="module" in given)


def ranked_environment(*, virtual: bool = False) -> Callable[[RankPlace], Mapping[str, str]]:
    """What an elastic agent tells each of its workers. `virtual`: with --virtual-local-rank every
    worker takes itself for the only one of its node."""

    def environment(place: RankPlace) -> Mapping[str, str]:
        found = {"ROLE_RANK": str(place.rank)}
        if virtual:
            found |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(place.local_rank)}
        return found

    return environment


def agent_environment(world: World, threads: str | None, role: str = "default") -> dict[str, str]:
    """What an elastic agent tells all its workers alike; `threads`: OMP_NUM_THREADS so far."""
    found = {
        "ROLE_NAME": role,
        "ROLE_WORLD_SIZE": str(world.size),
        "GROUP_WORLD_SIZE": str(world.nodes),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if threads is None and world.local_size > 1:
        found["OMP_NUM_THREADS"] = "1"
    return found


def _fixed(given: Given, world: World, context: Context) -> dict[str, str]:
    found = agent_environment(
        world, context.variable("OMP_NUM_THREADS"), last(given, "role", "default")
    )
    for option, variable in (
        ("max-restarts", "TORCHELASTIC_MAX_RESTARTS"),
        ("signals-to-handle", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
        ("master-addr", "MASTER_ADDR"),
        ("master-port", "MASTER_PORT"),
    ):
        if value := last(given, option):
            found[variable] = value
    if said := context.variable("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = said
    return found


def _said(given: Given, option: str, context: Context) -> str:
    """An option's value, else that of the variable which torchrun takes for its default."""
    variable = "PET_" + option.replace("-", "_").upper()
    return last(given, option) or context.variable(variable) or ""


def _nodes(launcher: str, text: str) -> tuple[int, tuple[str, ...]]:
    """The nodes to estimate for. Of an elastic job the fewest: then every rank of a sharded job
    holds the largest share."""
    least, colon, most = text.partition(":")
    nodes = whole(launcher, "--nnodes", least)
    if not colon or whole(launcher, "--nnodes", most) == nodes:
        return nodes, ()
    if int(most) < nodes:
        raise UsageError(f"{launcher}: --nnodes {text} is no range", f"--nnodes {most}:{least}")
    return nodes, (
        f"{launcher} --nnodes {text}: estimated for {nodes}, where every rank of a sharded job "
        f"holds the largest share; --nnodes {most} shows the other end",
    )


def _processes(launcher: str, text: str, context: Context) -> int:
    if text in _DEVICE_WORDS:
        return context.gpus(f"{launcher} --nproc-per-node {text}", "--nproc-per-node 8")
    if text == "cpu":
        return os.cpu_count() or 1
    return whole(launcher, "--nproc-per-node", text)
