"""`memplan env`, and the GPU of this machine as nvidia-smi tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memplan import __version__
from memplan.capturing.patches.internals import MissingNameError
from memplan.cli import env, main
from memplan.cli.machine import machine_gpu, machine_profile
from memplan.types.device import find_profile, known_profiles
from tests.schemas import read_answer


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, output: str, rc: int = 0) -> None:
    """A driver tool that prints `output` whatever it is asked, and notes what that was."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho \"$@\" > {folder}/asked\nprintf '{output}'\nexit {rc}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_known_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA H100 80GB HBM3, 81559, 9.0\\n")
    gpu = machine_gpu()
    assert gpu is not None
    assert (gpu.name, gpu.total_bytes, gpu.capability) == (
        "NVIDIA H100 80GB HBM3",
        81559 << 20,
        (9, 0),
    )
    assert machine_profile() is find_profile("h100")


def test_the_same_name_with_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA GeForce RTX 3060, 8192, 8.6\\n")
    profile = machine_profile()
    assert profile is not None
    assert profile.device_name == "NVIDIA GeForce RTX 3060"
    assert 7.5 < profile.total_memory_bytes / (1 << 30) < 8
    assert profile.capability == (8, 6)


def test_an_unknown_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA RTX A6000, 49140, 8.6\\n")
    profile = machine_profile()
    assert profile is not None and profile.device_name == "NVIDIA RTX A6000"
    assert profile.context_bytes == find_profile("rtx3090").context_bytes


@pytest.mark.parametrize(
    ("output", "rc"),
    [("", 0), ("No devices were found\\n", 6), ("a, b, c\\n", 0), ("x, [N/A], [N/A]\\n", 0)],
)
def test_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, rc: int) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, output, rc)
    assert machine_gpu() is None and machine_profile() is None


def test_a_card_too_old_for_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "Tesla K80, 11441, 3.7\\n")
    assert machine_gpu() is not None and machine_profile() is None


def test_hidden_and_chosen_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA L4, 23034, 8.9\\n")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert machine_gpu() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert machine_profile() is find_profile("l4")
    assert (tmp_path / "asked").read_text().rstrip().endswith("-i 2")


def test_env_as_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(env, "_self_test", lambda: (True, "fine"))
    assert main(["env", "--json"]) == 0
    answer = read_answer("env", capfd.readouterr().out)
    assert answer["schema_version"] == 1 and answer["memplan_version"] == __version__
    assert answer["capture_ok"] is True and answer["capture_detail"] == "fine"
    assert [p["name"] for p in answer["profiles"]] == [p.name for p in known_profiles()]
    assert all(p["sources"]["total_memory"] for p in answer["profiles"])


def test_env_for_people(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(env, "_self_test", lambda: (False, "RuntimeError: moved"))
    assert main(["env"]) == 0
    out = capfd.readouterr().out
    assert "capture   does not work: RuntimeError: moved" in out
    assert "rtx4090       23.5 GiB    8.9   445 MiB  NVIDIA GeForce RTX 4090" in out


def test_the_self_test_really_runs() -> None:
    ok, detail = env._self_test()
    assert ok, detail


def test_what_a_capture_would_meet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what the shim of fake CUDA meets: the whole session runs."""

    def gone(*_args: object) -> None:
        raise MissingNameError("torch.nn._gone")

    def overcounts(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("the step count is another")

    with monkeypatch.context() as patched:
        patched.setattr("memplan.capturing.standins.install._follow_functions", gone)
        assert env._self_test() == (False, MissingNameError("torch.nn._gone").message)
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", overcounts)
        ok, detail = env._self_test()
    assert not ok and detail.startswith("RuntimeError: the step count is another (at ")
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", lambda *_args, **_kwargs: None)
        ok, detail = env._self_test()
    assert not ok and "0 of a weight's size for optimizer state, not 2" in detail
    assert env._self_test()[0]
