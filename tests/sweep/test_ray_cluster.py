"""Captures on a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.sweep import ray_cluster

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

_SCRIPT = """
import argparse, os, signal
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()
if options.width == 13:
    raise ValueError("13 brings bad luck")
if options.width == 666:
    os.kill(os.getppid(), signal.SIGKILL)  # the worker of Ray that waits for this capture
layer = torch.nn.Linear(options.width, options.width).cuda()
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(20):
    layer(torch.randn(8, options.width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    head = {"num_cpus": 1, "include_dashboard": False}
    found = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    found.add_node(num_cpus=1)
    yield found
    found.shutdown()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT)
    return str(path)


def _sweep(cluster: Any, capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["sweep", "--json", "--gpu", "rtx4090", "--ray", cluster.address, *words]) == 0
    answer = json.loads(capfd.readouterr().out)
    return {row["values"]["width"]: row for row in answer["rows"]}


def test_captures_on_nodes_and_workers_that_are_killed(
    cluster: Any, script: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose worker is killed in each try is a row; so is one that the script refuses."""
    monkeypatch.setattr(ray_cluster, "_RETRIES", 1)
    rows = _sweep(cluster, capfd, "--vary", "width=64,13,666", script)
    statuses = {width: row["status"] for width, row in rows.items()}
    assert statuses == {"64": "fits", "13": "impossible", "666": "failed"}
    assert "bad luck" in rows["13"]["reason"]
    assert "WorkerCrashedError" in rows["666"]["reason"]
    here = main(["sweep", "--json", "--gpu", "rtx4090", "--vary", "width=64", script])
    [local] = json.loads(capfd.readouterr().out)["rows"]
    assert here == 0 and local["peak_bytes"] == rows["64"]["peak_bytes"]


def test_what_a_lost_node_was_at_is_done_by_another(
    cluster: Any, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    node = cluster.add_node(num_cpus=1)
    lost = threading.Thread(target=_lose_when_busy, args=(cluster, node), daemon=True)
    lost.start()
    rows = _sweep(cluster, capfd, "--vary", "width=32,48,64", script)
    lost.join()
    assert {row["status"] for row in rows.values()} == {"fits"}


def _lose_when_busy(cluster: Any, node: Any) -> None:
    """As soon as it has something to do."""
    while not ray.is_initialized():
        time.sleep(0.1)
    while ray.available_resources().get("CPU", 0) > 0:
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)


def test_a_capture_that_takes_too_long_is_a_row(
    cluster: Any, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "rtx4090", "--ray", cluster.address, "--vary", "width=8"]
    assert main(["sweep", "--timeout", "0.05", *words, script]) == 4
    assert "no answer within 0.05 s (--timeout)" in capfd.readouterr().out


def test_signals_are_still_those_of_the_command(cluster: Any) -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        with closing(ray_cluster.RayCluster(cluster.address)):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:train", "127.0.0.1:99999"])
def test_no_cluster_answers(address: str, script: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--gpu", "rtx4090", "--vary", "width=64", "--ray", address, script]
    assert main(words) == 2
    assert f"--ray {address}: " in capfd.readouterr().err
