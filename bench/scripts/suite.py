"""All cases, one module for each package."""

from __future__ import annotations

from importlib import import_module

from bench.scripts.case import Case

MODULES = (
    "trl",
    "accelerate",
    "torchtune",
    "litgpt",
    "lightning",
    "open_clip",
    "yolo",
    "pytorch_examples",
    "nanogpt",
    "timm",
    "diffusers",
    "libraries",
    "loops",
)


def cases() -> list[Case]:
    """The cases of every module, in order."""
    return [case for name in MODULES for case in import_module(f"bench.scripts.{name}").CASES]
