"""Kernels timed on a card of known rates give these rates, and estimates go by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from memplan.cli import calibrate, main
from memplan.runtime import kernel_cases
from memplan.timing.calibration import efficiencies
from memplan.timing.seconds import op_seconds
from memplan.types.device import DeviceProfile, find_profile, known_profiles
from memplan.types.device_corrections import read_corrections, save_context
from tests.timing.test_step import trained

CARD = find_profile("a100-80gb")
KNOWN = {
    "matmul": (0.5, 0.4),
    "pointwise": (0.8, 0.33),
    "conv_large": (0.44, 0.5),
    "layer_norm_forward": (0.8, 0.21),
}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    known_profiles.cache_clear()
    yield tmp_path / "config" / "memplan" / "devices.toml"
    known_profiles.cache_clear()


def without_data(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=torch.float16)


def clock_of(card: DeviceProfile) -> Any:
    """Times kernels as the card would run them by the time model."""

    def clock(func: Any, args: tuple[Any, ...]) -> float:
        return float(op_seconds(kernel_cases.called(func, args, func(*args)), card)[0])

    return clock


def of_cuda(card: DeviceProfile) -> Any:
    major, minor = card.capability
    return SimpleNamespace(
        name=card.device_name, total_memory=card.total_memory_bytes, major=major, minor=minor
    )


def with_known_card(monkeypatch: pytest.MonkeyPatch) -> None:
    known = msgspec.structs.replace(CARD, kernels=KNOWN)
    monkeypatch.setattr(calibrate, "machine_profile", lambda: CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: of_cuda(CARD))
    monkeypatch.setattr(kernel_cases, "on_the_card", without_data)
    monkeypatch.setattr(kernel_cases, "card_seconds", clock_of(known))


def test_what_is_measured_is_what_the_card_reaches() -> None:
    known = msgspec.structs.replace(CARD, kernels=KNOWN)
    cases = kernel_cases.timed_cases(without_data, clock_of(known))
    found = efficiencies(((one.trace, one.seconds) for one in cases if not one.error), CARD)
    assert found["matmul"].compute == pytest.approx(0.5, rel=0.02)
    assert found["pointwise"].memory == pytest.approx(0.33, rel=0.02)
    assert found["layer_norm_forward"].memory == pytest.approx(0.21, rel=0.02)
    own = {kind: (one.compute, one.memory) for kind, one in found.items()}
    calibrated = msgspec.structs.replace(CARD, kernels=own)
    for one in cases:
        if not one.error and one.name not in ("matmul 512", "pointwise in L2", "conv 3x3 nchw"):
            assert op_seconds(one.trace, calibrated)[0] == pytest.approx(one.seconds, rel=0.03), one


def test_estimates_go_by_memplans_own_file(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_known_card(monkeypatch)
    save_context(CARD.device_name, (100, 200, 300), "by hand")
    assert main(["calibrate"]) == 0
    said = capsys.readouterr().out
    assert "matmul" in said and f"wrote {config}" in said
    known_profiles.cache_clear()
    card, other = (
        next(one for one in known_profiles() if one.name == name) for name in ("a100-80gb", "h100")
    )
    assert card.kernels["matmul"][0] == pytest.approx(0.5, rel=0.02)
    assert card.sources["kernels"].startswith("measured here on ")
    assert card.context_bytes == 200 << 20, "what else was measured stays"
    assert not other.kernels
    before, after = (op_seconds(trained(False), one).sum() for one in (CARD, card))
    assert after > 1.2 * before


def test_a_file_of_its_own_is_read_where_it_is_named(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_known_card(monkeypatch)
    file = tmp_path / "a100.toml"
    assert main(["calibrate", "-o", str(file)]) == 0
    assert not config.exists()
    assert main(["calibrate", "-o", str(file)]) == 2, "it is not overwritten"
    card = calibrate.calibrated(str(file), CARD)
    assert card is not None and card.kernels["matmul"][0] == pytest.approx(0.5, rel=0.02)
    cards = {"h100": find_profile("h100"), "a100-80gb": CARD}
    swept = calibrate.calibrated_cards(str(file), cards)
    assert swept["a100-80gb"].kernels and not swept["h100"].kernels


def test_estimate_reads_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_known_card(monkeypatch)
    file = tmp_path / "a100.toml"
    main(["calibrate", "-o", str(file)])
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8192, 8192, bias=False).cuda().half()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(5):\n"
        "    model(torch.randn(8192, 8192).cuda().half()).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    answers = []
    for words in ([], ["--calibration", str(file)]):
        capsys.readouterr()
        assert main(["estimate", "--json", "--gpu", "a100-80gb", *words, str(script)]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    plain, own = (one["kernel_seconds"]["matrix products"] for one in answers)
    assert own > 1.3 * plain
    assert any(note.startswith("kernels of a100-80gb: measured") for note in answers[1]["notes"])


@pytest.mark.parametrize("command", ["estimate", "fit"])
def test_a_file_of_another_card_is_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_known_card(monkeypatch)
    file = tmp_path / "a100.toml"
    main(["calibrate", "-o", str(file)])
    (tmp_path / "train.py").write_text("")
    words = ["--gpu", "h100", "--calibration", str(file), str(tmp_path / "train.py")]
    assert main([command, *words]) == 2
    assert f"{file} is of {CARD.device_name}, not of NVIDIA H100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ("matmul = [0, 1]", "Expected `float` >= 1e-06"),
        ("matmul = [1e-320, 1e-320]", "Expected `float` >= 1e-06"),
        ("matmul = [nan, 0.5]", "Expected `float`"),
        ("matmul = [17, 0.5]", "Expected `float` <= 16"),
        ("matmul = [0.5, 0.5]\nbananas = [1, 1]", "no such class of kernels: bananas"),
        ("", "is of no card"),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "fit", "sweep"])
def test_a_file_that_says_nothing_sane_is_refused(
    command: str, kernels: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a100.toml"
    file.write_text(f'[devices."{CARD.device_name}".kernels]\n{kernels}\n')
    (tmp_path / "train.py").write_text("")
    words = ["--gpu", "a100-80gb", "--calibration", str(file), str(tmp_path / "train.py")]
    assert main([command, *words]) == 2
    assert said in capsys.readouterr().err


def test_what_calibrate_writes_can_be_read(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_known_card(monkeypatch)
    kernels = KNOWN | {"pointwise": (0.8, 1.23e-4), "matmul": (1e-9, 1e-9)}
    slow = msgspec.structs.replace(CARD, kernels=kernels)
    monkeypatch.setattr(kernel_cases, "card_seconds", clock_of(slow))
    assert main(["calibrate"]) == 0
    assert "matmul: left out" in capsys.readouterr().out
    card = calibrate.calibrated(str(config), CARD)
    assert card is not None and "matmul" not in card.kernels
    assert card.kernels["pointwise"][1] == pytest.approx(1.23e-4, rel=0.02)


def test_the_card_that_is_timed_is_the_one_that_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_known_card(monkeypatch)
    first = find_profile("h100")
    monkeypatch.setattr(calibrate, "machine_profile", lambda: first)
    assert main(["calibrate"]) == 0
    assert f"step times on {CARD.device_name} are" in capsys.readouterr().out
    assert list(read_corrections(config)) == [CARD.device_name]
    unknown = msgspec.structs.replace(CARD, device_name="NVIDIA X", capability=(3, 5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: of_cuda(unknown))
    assert main(["calibrate"]) == 4
    assert "no profile of NVIDIA X" in capsys.readouterr().err


def test_without_a_gpu_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "machine_profile", lambda: None)
    assert main(["calibrate"]) == 4
    assert "no NVIDIA GPU is visible here" in capsys.readouterr().err
    monkeypatch.setattr(calibrate, "machine_profile", lambda: CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate"]) == 4
    assert "cannot use it" in capsys.readouterr().err
