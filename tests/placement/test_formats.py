"""Placements in the words of schedulers, read by their own parsers where those are here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from memplan.cli.place import FORMATS
from memplan.placement.answer import Placement
from memplan.placement.formats import Request, written
from memplan.placement.place import demand_of_answer, place
from memplan.types.device import known_profiles
from memplan.types.errors import UsageError
from tests.conftest import ROOT
from tests.placement.answers import GIB, answer_of

_KUBERNETES = ("kubernetes", "dra", "kueue", "hami", "kai")
_VERSION = "1.34"
"""The first release with `resource.k8s.io/v1`."""


def _placement(**fields: Any) -> Placement:
    answer = answer_of("a100-80gb", 12 * GIB, host=16 * GIB, **fields)
    return place(demand_of_answer(msgspec.json.encode(answer)))


def _asked(scheduler: str, *, mig: bool = False, **fields: Any) -> str:
    found = _placement(**fields)
    slot = found.mig if mig else found.card
    assert slot is not None
    return written(scheduler, Request(found, slot, "queue-of-mine", "registry/train:1"))


def _documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def _many() -> dict[str, Any]:
    return {"world_size": 16, "host_processes": 8}


def _container(document: Any) -> Any:
    return document["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("scheduler", _KUBERNETES)
def test_kubernetes_schema(scheduler: str, several: bool) -> None:
    schema = pytest.importorskip("kubernetes_validate")
    for document in _documents(_asked(scheduler, **(_many() if several else {}))):
        schema.validate(document, _VERSION, strict=True)


def test_the_schema_refuses_what_kubernetes_would() -> None:
    schema = pytest.importorskip("kubernetes_validate")
    [job] = _documents(_asked("kubernetes"))
    job["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(schema.ValidationError):
        schema.validate(job, _VERSION, strict=True)


def test_kubernetes_asks_for_gpus_memory_and_nodes_with_such_cards() -> None:
    [job] = _documents(_asked("kubernetes", **_many()))
    assert _container(job)["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "16384Mi"}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    [terms] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    wanted = {one["key"]: one["values"] for one in terms["matchExpressions"]}
    assert wanted["nvidia.com/gpu.compute.major"] == ["8"]
    [least] = wanted["nvidia.com/gpu.memory"]
    assert 12 * 1024 < 0.97 * (int(least) + 1) < 12 * 1024 + 1


def test_what_the_driver_reports_is_never_mistaken_for_what_a_process_sees() -> None:
    """`nvidia.com/gpu.memory` of these cards, in MiB, as nvidia-smi prints it in public reports."""
    driver = {"t4": 15360, "v100-16gb": 16384, "a100-40gb": 40960, "a100-80gb": 81920}
    driver |= {"rtx3060": 12288, "rtx3090": 24576, "rtx4090": 24564, "h100": 81559, "a10g": 23028}
    for card in known_profiles():
        if card.name in driver:
            assert 0.97 * driver[card.name] <= card.total_memory_bytes >> 20, card.name


def test_a_slice_by_its_resource() -> None:
    [job] = _documents(_asked("kubernetes", mig=True))
    assert _container(job)["resources"]["limits"]["nvidia.com/mig-3g.20gb"] == 1
    assert "--gres=gpu:3g.20gb:1\n" in _asked("slurm", mig=True)
    for scheduler in ("hami", "kai", "skypilot"):
        with pytest.raises(UsageError, match="MIG slice"):
            _asked(scheduler, mig=True)


@pytest.mark.parametrize("mig", [False, True])
def test_a_claim_selects_by_capacity(mig: bool) -> None:
    """The expression, parsed and evaluated by cel-python, with Kubernetes' own functions on
    quantities and versions written after their documentation."""
    claim, job = _documents(_asked("dra", mig=mig))
    assert _container(job)["resources"]["claims"] == [{"name": "gpus"}]
    [request] = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == ("mig" if mig else "gpu") + ".nvidia.com"
    [selector] = request["exactly"]["selectors"]
    expression = selector["cel"]["expression"]
    assert _selects(expression, "81920Mi", "8.0.0")
    assert _selects(expression, "12700Mi", "8.0.0")
    assert _selects(expression, "12300Mi", "8.0.0") == mig
    assert not _selects(expression, "12200Mi", "8.0.0")
    assert not _selects(expression, "81920Mi", "9.0.0")


def _selects(expression: str, memory: str, capability: str) -> bool:
    celpy = pytest.importorskip("celpy")

    def quantity(text: str) -> Any:
        return celpy.celtypes.IntType(text.removesuffix("Mi"))

    def compare(left: Any, right: Any) -> Any:
        return celpy.celtypes.IntType((left > right) - (left < right))

    def version(text: str) -> Any:
        major, minor, patch = map(int, text.split("."))
        return celpy.celtypes.IntType(major * 10000 + minor * 100 + patch)

    environment = celpy.Environment()
    functions = {"quantity": quantity, "semver": version, "compareTo": compare}
    program = environment.program(environment.compile(expression), functions=functions)
    driver = "gpu.nvidia.com"
    device = {
        "capacity": {driver: {"memory": quantity(memory)}},
        "attributes": {driver: {"cudaComputeCapability": version(capability)}},
    }
    return bool(program.evaluate({"device": celpy.json_to_cel(device)}))


def test_queues_and_annotations() -> None:
    [kueue] = _documents(_asked("kueue"))
    assert kueue["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "queue-of-mine"}
    assert kueue["spec"]["suspend"] is True
    [kai] = _documents(_asked("kai", **_many()))
    pod = kai["spec"]["template"]
    assert pod["spec"]["schedulerName"] == "kai-scheduler"
    assert pod["metadata"]["labels"] == {"kai.scheduler/queue": "queue-of-mine"}
    assert pod["metadata"]["annotations"] == {
        "gpu-memory": "12288",
        "gpu-fraction-num-devices": "8",
    }
    [hami] = _documents(_asked("hami", **_many()))
    limits = _container(hami)["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["nvidia.com/gpumem"]) == (8, 12288)


def test_skypilot() -> None:
    [task] = _documents(_asked("skypilot", **_many()))
    assert task == {"num_nodes": 2, "resources": {"accelerators": "A100:8", "memory": "16+"}}
    sky = pytest.importorskip("sky")
    read = sky.Task.from_yaml_config(task)
    [resources] = read.resources
    assert read.num_nodes == 2 and resources.accelerators == {"A100": 8}
    assert resources.memory == "16+"


def test_slurm(tmp_path: Path) -> None:
    text = _asked("slurm", **_many())
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=a100-40gb:8\n" in text
    assert "#SBATCH --mem=16384M\n" in text
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        pytest.skip("no sbatch (Debian's slurm-client) to read it")
    assert "Unable to contact slurm controller" in _submitted(sbatch, tmp_path, text)
    wrong = text.replace("--gpus-per-node", "--gpu-per-nodes")
    assert "unrecognized option" in _submitted(sbatch, tmp_path, wrong)


def _submitted(sbatch: str, folder: Path, options: str) -> str:
    """What `sbatch` says: options are read before a controller is looked for, and none is there."""
    settings = folder / "slurm.conf"
    settings.write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nAuthType=auth/none\nGresTypes=gpu\n"
    )
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{options}true\n")
    around = os.environ | {"SLURM_CONF": str(settings)}
    if "MEMPLAN_SLURM_PLUGINS" in os.environ:
        with settings.open("a") as file:
            file.write(f"PluginDir={os.environ['MEMPLAN_SLURM_PLUGINS']}\n")
    words = [sbatch, "--test-only", str(script)]
    return subprocess.run(words, env=around, capture_output=True, text=True).stderr


def test_every_format_of_the_command_is_written() -> None:
    for scheduler in FORMATS:
        if scheduler not in ("text", "json"):
            assert _asked(scheduler).endswith("\n")


def test_a_host_that_is_not_known_is_not_asked_for() -> None:
    found = msgspec.structs.replace(_placement(), host_bytes_per_node=None)
    assert found.card is not None
    for scheduler in FORMATS:
        if scheduler not in ("text", "json"):
            said = written(scheduler, Request(found, found.card, "q", "i"))
            assert "--mem" not in said and "  memory: " not in said


def test_a_card_given_by_its_size_has_no_name_for_skypilot() -> None:
    answer = answer_of("48GiB:sm80", 12 * GIB)
    found = place(demand_of_answer(msgspec.json.encode(answer)))
    assert found.card is not None
    slot = msgspec.structs.replace(found.card, card="48GiB:sm80")
    with pytest.raises(UsageError, match="SkyPilot has no name"):
        written("skypilot", Request(found, slot, "q", "i"))


def test_the_failure_policy_of_the_docs_is_one() -> None:
    """Exit codes that end a Job, as docs/place.md writes them."""
    schema = pytest.importorskip("kubernetes_validate")
    page = (ROOT / "docs" / "place.md").read_text(encoding="utf-8")
    [block] = [one.partition("```")[0] for one in page.split("```yaml\n")[1:]]
    [job] = _documents(block)
    schema.validate(job, _VERSION, strict=True)
    ends = [
        rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule and rule["action"] == "FailJob"
    ]
    assert ends == [[2, 3, 4]]
