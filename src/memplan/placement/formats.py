"""A placement in the words of schedulers. `docs/place.md` has the sources of each form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from memplan.placement.answer import Placement, Slot
from memplan.types.device import MIB
from memplan.types.errors import UsageError

_GIB = 1 << 30
_NAME = "memplan-job"
_SEEN_BY_CUDA = 0.97
"""Labels and claims are made from the memory that the driver reports. A process sees at least this
share of it: 14930 of 15360 MiB on a T4, the lowest of the known cards."""
_SKYPILOT = {
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
    "t4": "T4",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "a10g": "A10G",
    "rtx3060": "RTX3060",
    "rtx3090": "RTX3090",
    "l4": "L4",
    "l40s": "L40S",
    "rtx4060": "RTX4060",
    "rtx4090": "RTX4090",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "rtx5090": "RTX5090",
}


@dataclass(frozen=True)
class Request:
    """A placement, and which of its slots is asked for."""

    found: Placement
    slot: Slot
    queue: str
    image: str

    @property
    def needed_mib(self) -> int:
        return math.ceil(self.slot.needed_bytes / MIB)

    @property
    def driver_mib(self) -> int:
        """The memory that a card has to have by its driver."""
        return math.ceil(self.needed_mib / _SEEN_BY_CUDA)

    @property
    def host_mib(self) -> int | None:
        bytes_ = self.found.host_bytes_per_node
        return None if bytes_ is None else math.ceil(bytes_ / MIB)


def written(scheduler: str, request: Request) -> str:
    """The text for a scheduler. Raises UsageError where it cannot be asked for that."""
    return _WRITERS[scheduler](request)


def _slurm(request: Request) -> str:
    found, slot = request.found, request.slot
    count = found.gpus_per_node
    asked = f"--gres=gpu:{slot.mig}:1" if slot.mig else f"--gpus-per-node={slot.card}:{count}"
    lines = [f"#SBATCH --nodes={found.nodes}", f"#SBATCH {asked}"]
    if request.host_mib is not None:
        lines.append(f"#SBATCH --mem={request.host_mib}M")
    lines.append(f"# {slot.mig or slot.card}: the type as your gres.conf names it (sinfo -o %G)")
    return "\n".join(lines) + "\n"


def _yaml(*documents: dict[str, Any]) -> str:
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=200))


def _kubernetes(request: Request) -> str:
    return _yaml(_job(request, _limits(request), _near_card(request)))


def _kueue(request: Request) -> str:
    job = _job(request, _limits(request), _near_card(request))
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": request.queue}
    job["spec"]["suspend"] = True
    return _yaml(job)


def _dra(request: Request) -> str:
    driver, slot = "gpu.nvidia.com", request.slot
    words = [
        f'device.capacity["{driver}"].memory.compareTo(quantity("{_claimed_mib(request)}Mi")) >= 0'
    ]
    words.append(
        f'device.attributes["{driver}"].cudaComputeCapability'
        f'.compareTo(semver("{slot.capability}.0")) == 0'
    )
    exactly: dict[str, Any] = {
        "deviceClassName": "mig.nvidia.com" if slot.mig else driver,
        "count": request.found.gpus_per_node,
        "selectors": [{"cel": {"expression": " && ".join(words)}}],
    }
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": f"{_NAME}-gpus"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}},
    }
    job = _job(request, {}, {})
    pod = job["spec"]["template"]["spec"]
    pod["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": f"{_NAME}-gpus"}]
    pod["containers"][0]["resources"]["claims"] = [{"name": "gpus"}]
    return _yaml(claim, job)


def _claimed_mib(request: Request) -> int:
    """A slice's capacity is what CUDA sees of it; of a card CUDA sees less than the driver."""
    return request.needed_mib if request.slot.mig else request.driver_mib


def _hami(request: Request) -> str:
    _whole_cards_only(request, "HAMi")
    limits = {
        "nvidia.com/gpu": request.found.gpus_per_node,
        "nvidia.com/gpumem": request.needed_mib,
    }
    return _yaml(_job(request, limits, {}))


def _kai(request: Request) -> str:
    _whole_cards_only(request, "KAI")
    job = _job(request, {}, {})
    template = job["spec"]["template"]
    count = request.found.gpus_per_node
    several = {"gpu-fraction-num-devices": str(count)} if count > 1 else {}
    template["metadata"] = {
        "labels": {"kai.scheduler/queue": request.queue},
        "annotations": {"gpu-memory": str(request.needed_mib), **several},
    }
    template["spec"]["schedulerName"] = "kai-scheduler"
    return _yaml(job)


def _skypilot(request: Request) -> str:
    _whole_cards_only(request, "SkyPilot")
    found, slot = request.found, request.slot
    if slot.card not in _SKYPILOT:
        raise UsageError(
            f"SkyPilot has no name for {slot.card}", "a card by its name, as in --gpu a100-80gb"
        )
    resources: dict[str, Any] = {"accelerators": f"{_SKYPILOT[slot.card]}:{found.gpus_per_node}"}
    if found.host_bytes_per_node is not None:
        resources["memory"] = f"{math.ceil(found.host_bytes_per_node / _GIB)}+"
    return _yaml({"num_nodes": found.nodes, "resources": resources})


def _whole_cards_only(request: Request, name: str) -> None:
    if request.slot.mig:
        raise UsageError(f"{name} is not asked for a MIG slice by its name", "leave --mig out")


def _limits(request: Request) -> dict[str, int]:
    if request.slot.mig:
        return {f"nvidia.com/mig-{request.slot.mig}": 1}
    return {"nvidia.com/gpu": request.found.gpus_per_node}


def _near_card(request: Request) -> dict[str, Any]:
    """Nodes whose GPUs run the same kernels and are large enough, by GPU feature discovery."""
    major, minor = request.slot.capability.split(".")
    wanted: list[dict[str, Any]] = [
        {"key": "nvidia.com/gpu.compute.major", "operator": "In", "values": [major]},
        {"key": "nvidia.com/gpu.compute.minor", "operator": "In", "values": [minor]},
    ]
    if not request.slot.mig:  # of a slice, the resource's name says it
        least = str(request.driver_mib - 1)
        wanted.append({"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [least]})
    terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _job(request: Request, limits: dict[str, int], affinity: dict[str, Any]) -> dict[str, Any]:
    """A Job with one pod a node; what it runs is the image's."""
    memory = {} if request.host_mib is None else {"memory": f"{request.host_mib}Mi"}
    resources = {"limits": {**limits, **memory}} if limits or memory else {}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [{"name": "train", "image": request.image, "resources": resources}],
    }
    if affinity:
        pod["affinity"] = affinity
    nodes = request.found.nodes
    count = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _NAME},
        "spec": {**(count if nodes > 1 else {}), "backoffLimit": 0, "template": {"spec": pod}},
    }


_WRITERS: dict[str, Callable[[Request], str]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "dra": _dra,
    "kueue": _kueue,
    "skypilot": _skypilot,
    "hami": _hami,
    "kai": _kai,
}
