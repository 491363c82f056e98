"""Device profiles: complete, consistent, found by what people type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.types.device import (
    DEFAULT_PROFILE,
    DeviceProfile,
    find_profile,
    known_profiles,
    parse_size,
    profile_of_size,
)
from memplan.types.errors import UsageError

GIB = 1 << 30
NAMES = [
    "v100-16gb",
    "v100-32gb",
    "t4",
    "a100-40gb",
    "a100-80gb",
    "a10g",
    "rtx3060",
    "rtx3090",
    "l4",
    "l40s",
    "rtx4060",
    "rtx4090",
    "h100",
    "h200",
    "b200",
    "rtx5090",
]


def test_the_promised_cards_are_there() -> None:
    assert [p.name for p in known_profiles()] == NAMES
    assert find_profile(DEFAULT_PROFILE).capability == (8, 0)


@pytest.mark.parametrize("profile", known_profiles(), ids=lambda p: p.name)
def test_figures_are_plausible_and_sourced(profile: DeviceProfile) -> None:
    assert profile.context_low_bytes < profile.context_bytes < profile.context_high_bytes
    assert profile.context_low_bytes >= 90 << 20 and profile.context_high_bytes < GIB
    assert 7 * GIB < profile.total_memory_bytes < 192 * GIB
    # A size in the name is the size of its chips; the driver keeps up to a tenth (ECC).
    marketed = {"16gb": 16, "32gb": 32, "40gb": 40, "80gb": 80}.get(profile.name[-4:])
    if marketed:
        assert 0.9 * marketed <= profile.total_memory_bytes / GIB < marketed
    assert profile.cublas_workspace_bytes == (
        32 << 20 if profile.capability >= (9, 0) else 8_519_680
    )
    assert profile.shared_memory_per_block_optin_bytes <= 227 << 10
    assert profile.peak_flops["fp16"] >= profile.peak_flops["fp32"] > 1e12
    assert ("bf16" in profile.peak_flops) == (profile.capability >= (8, 0))
    assert set(profile.sources) >= {"total_memory", "context", "rates", "cublas_workspace"}
    assert all(len(text) > 10 for text in profile.sources.values())


@pytest.mark.parametrize("profile", known_profiles(), ids=lambda p: p.name)
def test_found_by_either_name_however_written(profile: DeviceProfile) -> None:
    for text in (profile.name, profile.device_name):
        for spelling in (text, text.upper(), text.replace("-", " "), text.replace(" ", "_")):
            assert find_profile(spelling) is profile


@pytest.mark.parametrize(
    ("text", "name"),
    [("NVIDIA A100 80GB PCIe", "a100-80gb"), ("4090", "rtx4090"), ("GeForce RTX 3060", "rtx3060")],
)
def test_aliases(text: str, name: str) -> None:
    assert find_profile(text).name == name


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * GIB),
        ("24Gi", 24 * GIB),
        ("24576MiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("1.5Gi", GIB * 3 // 2),
        ("24GB", 24_000_000_000),
        ("24G", 24_000_000_000),
        ("25769803776", 24 * GIB),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    profile = find_profile(text)
    assert profile.total_memory_bytes == nbytes
    assert profile.capability == (8, 0)
    assert find_profile(profile.name).total_memory_bytes == nbytes, "as a trace names it"


@given(st.integers(64 << 20, 1 << 40))
def test_plain_bytes_are_taken_to_the_byte(nbytes: int) -> None:
    assert find_profile(str(nbytes)).total_memory_bytes == nbytes


@pytest.mark.parametrize(
    ("text", "capability"),
    [("24GiB:sm90", (9, 0)), ("24GiB:9.0", (9, 0)), ("16Gi:sm_120", (12, 0)), ("9Gi:sm89", (8, 9))],
)
def test_size_with_capability(text: str, capability: tuple[int, int]) -> None:
    profile = find_profile(text)
    assert profile.capability == capability
    family = [p for p in known_profiles() if p.capability == capability]
    assert profile.context_low_bytes == min(p.context_low_bytes for p in family)
    assert profile.context_high_bytes == max(p.context_high_bytes for p in family)
    assert profile.cublas_workspace_bytes == family[0].cublas_workspace_bytes


def test_a_newer_chip_of_a_known_generation_takes_the_nearest() -> None:
    assert profile_of_size(100 * GIB, (10, 3)).sm_count == find_profile("b200").sm_count


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("rtx4080", "unknown GPU 'rtx4080'", "rtx4090"),
        ("h10", "unknown GPU 'h10'", "--gpu h100"),
        ("h100,l4", "unknown GPU 'h100,l4'", "memplan sweep --gpu h100,l4 …"),
        ("nonsense", "unknown GPU 'nonsense'", "memplan env"),
        ("", "unknown GPU ''", "memplan env"),
        ("a100", "'a100' comes in several sizes", "--gpu a100-40gb or --gpu a100-80gb"),
        ("24", "'24' is too small for a GPU", "24GiB"),
        ("24GiB:sm61", "no profile of compute capability 6.1", "sm70, sm75, sm80"),
        ("24GiB:ada", "'ada' is not a compute capability", "24GiB:sm90"),
    ],
)
def test_errors_say_what_to_try(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_profile(text)
    assert caught.value.message == message
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["", "many", "-1GiB", "1e9", "24PiB"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)
