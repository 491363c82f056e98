"""`PYTORCH_ALLOC_CONF`, against PyTorch's own parser where this build of torch has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.simulate.settings import MIB, UNLIMITED, AllocatorSettings
from memplan.types.alloc_conf import conf_in
from memplan.types.errors import UsageError


def test_defaults_are_those_of_pytorch() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings().max_split_size == UNLIMITED
    assert AllocatorSettings().large_segment_size == 20 * MIB


def test_every_kind_of_value() -> None:
    parsed = AllocatorSettings.parse(
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.6,"
        "roundup_power2_divisions:4,per_process_memory_fraction:0.5,backend:native,"
        "release_lock_on_hipmalloc:True,pinned_num_register_threads:8,"
    )
    assert parsed == AllocatorSettings(
        expandable_segments=True,
        max_split_size=128 * MIB,
        garbage_collection_threshold=0.6,
        roundup_power2_divisions=(4,) * 16,
        per_process_memory_fraction=0.5,
    )


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("[256:1,512:2,>:4]", [1] * 9 + [2] + [4] * 6),
        ("[64:8,256:4,1024:4,>:1]", [8] * 7 + [0] + [4] + [0] + [4] + [1] * 5),
        ("[>:4,256:1]", [1] * 9 + [4] * 7),
        ("[1:2,65536:4]", [2] + [0] * 14 + [4]),
        ("[]", [0] * 16),
    ],
)
def test_divisions_by_size(text: str, divisions: list[int]) -> None:
    parsed = AllocatorSettings.parse(f"roundup_power2_divisions:{text}")
    assert list(parsed.roundup_power2_divisions) == divisions


def test_rounding_limit_follows_the_large_segment_in_any_order() -> None:
    parsed = AllocatorSettings.parse("max_split_size_mb:64,large_segment_size_mb:64")
    assert parsed.max_non_split_rounding == 64 * MIB
    with pytest.raises(UsageError, match="max_split_size_mb must be at least 64"):
        AllocatorSettings.parse("max_split_size_mb:32,large_segment_size_mb:64")


def test_unknown_key_suggests_the_near_one() -> None:
    with pytest.raises(UsageError, match="did you mean expandable_segments") as raised:
        AllocatorSettings.parse("expandable_segment:True")
    assert raised.value.exit_code == 2


REFUSED_BY_BOTH = [
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "max_split_size_mb:",
    "large_segment_size_mb:10",
    "large_segment_size_mb:64,max_split_size_mb:30",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:1,300:2]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[256:1,512:2",
    "expandable_segments:true",
]
TAKEN_BY_BOTH: dict[str, dict[str, Any]] = {
    "": {},
    "max_split_size_mb:20": {"max_split_size": 20 * MIB},
    "max_split_size_mb:30,": {"max_split_size": 30 * MIB},
    "large_segment_size_mb:11": {
        "large_segment_size": 11 * MIB,
        "max_non_split_rounding": 11 * MIB,
    },
    "max_non_split_rounding_mb:20": {"max_non_split_rounding": 20 * MIB},
    "garbage_collection_threshold:0.5": {"garbage_collection_threshold": 0.5},
    "roundup_power2_divisions:4": {"roundup_power2_divisions": (4,) * 16},
    "roundup_power2_divisions:[256:1,512:2,>:4]": {
        "roundup_power2_divisions": (*(1,) * 9, 2, *(4,) * 6)
    },
    "roundup_power2_divisions:[]": {},
    "roundup_power2_divisions:[256:1,512:0]": {"roundup_power2_divisions": (*(1,) * 9, *(0,) * 7)},
    "expandable_segments: False ": {},
    "pinned_use_background_threads:True": {},
}


@pytest.fixture
def torch_parser() -> object:
    """PyTorch's parser of the settings common to all devices; its state is restored."""
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if parse is None:
        pytest.skip("this torch has no parser of allocator settings without a device")
    yield parse
    parse("large_segment_size_mb:20")
    parse("")


@pytest.mark.parametrize("conf", REFUSED_BY_BOTH)
def test_refused_as_by_pytorch(conf: str, torch_parser: object) -> None:
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        torch_parser(conf)  # type: ignore[operator]
    with pytest.raises(UsageError):
        AllocatorSettings.parse(conf)


@pytest.mark.parametrize(("conf", "fields"), TAKEN_BY_BOTH.items())
def test_taken_as_by_pytorch(conf: str, fields: dict[str, Any], torch_parser: object) -> None:
    torch_parser(conf)  # type: ignore[operator]
    assert AllocatorSettings.parse(conf) == AllocatorSettings(**fields)


@pytest.mark.parametrize(
    "conf",
    ["foo:1", ",", "max_split_size_mb:21x", "max_split_size_mb:-1", "a]", "[", "backend:best",
     "per_process_memory_fraction:2", "pinned_num_register_threads:3", "expandable_segments=True"],
)  # fmt: skip
def test_nonsense_is_a_usage_error(conf: str) -> None:
    with pytest.raises(UsageError, match="allocator settings"):
        AllocatorSettings.parse(conf)


def test_environment_precedence() -> None:
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:30", "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert AllocatorSettings.parse(conf_in(both)) == AllocatorSettings()
    del both["PYTORCH_CUDA_ALLOC_CONF"]
    assert AllocatorSettings.parse(conf_in(both)).max_split_size == 30 * MIB
    assert AllocatorSettings.parse(conf_in({})) == AllocatorSettings()
