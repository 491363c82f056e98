"""Kernels of the Hugging Face Hub, which the package `kernels` fetches for the GPU that it finds.

A kernel that another package has too is answered by that package's stand-in, one with rules by a
module of those; any other is refused: its code cannot be loaded here.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.standins.finder import StandInFinder, make_permissive
from memplan.capturing.standins.registry import rules_of_module
from memplan.capturing.standins.rules import running
from memplan.types.errors import CaptureError

_COMMUNITY = "kernels-community/"
_SAME = {
    "flash-attn": "flash_attn",
    "flash-attn2": "flash_attn",
    "flash-attn3": "flash_attn_interface",
    "vllm-flash-attn3": "flash_attn_interface",
}
"""Kernels of the community's, and the package whose functions they are."""
MODULES = ("load", "utils", "layer", "layer.layer", "layer.func")
"""Modules of `kernels` in which its versions define what is replaced."""


def adapt(patches: Patches, finder: StandInFinder, module: ModuleType) -> None:
    """Adapt an installed `kernels`: nothing is downloaded."""

    def get(repo_id: str, *_args: Any, **_kwargs: Any) -> ModuleType:
        return _module(finder, repo_id)

    def has(repo_id: str, *_args: Any, **_kwargs: Any) -> bool:
        return _package(repo_id) is not None or bool(_rules(repo_id))

    def load(repository: Any) -> Any:
        layer = getattr(repository, "layer_name", getattr(repository, "func_name", ""))
        raise _refusal(
            repository._repo_id,
            f"{layer} of the kernel",
            "without it (use_kernels=True of transformers) the model's own layers are captured",
        )

    for name in ("get_kernel", "get_locked_kernel", "load_kernel"):
        if getattr(vars(module).get(name), "__module__", "") == module.__name__:
            patches.set(module, name, get)
    if getattr(vars(module).get("has_kernel"), "__module__", "") == module.__name__:
        patches.set(module, "has_kernel", has)
    for name, value in list(vars(module).items()):
        fetches = name.endswith("Repository") and not name.startswith("Local")
        for method in ("load", "_resolve_revision") if fetches and isinstance(value, type) else ():
            if method in vars(value):
                patches.set(value, method, load)


def _package(repo_id: str) -> str | None:
    return _SAME.get(repo_id.removeprefix(_COMMUNITY)) if repo_id.startswith(_COMMUNITY) else None


def _name(repo_id: str) -> str:
    return repo_id.rpartition("/")[2].replace("-", "_")


def _rules(repo_id: str) -> dict[str, Any]:
    return dict(rules_of_module(_name(repo_id)))


def _module(finder: StandInFinder, repo_id: str) -> ModuleType:
    if rules := _rules(repo_id):
        made = ModuleType(_name(repo_id))
        vars(made).update(rules)
        make_permissive(made)
        return made
    package = _package(repo_id)
    if package is None:
        raise _refusal(
            repo_id,
            "the kernel",
            f'say it in a file of rules: memplan.register_rule("{_name(repo_id)}.FUNCTION", …), '
            "--with RULES.py (docs/packages.md)",
        )
    finder.want(package)
    return importlib.import_module(package)


def _refusal(repo_id: str, what: str, hint: str) -> CaptureError:
    state = running()
    return CaptureError(
        f"{(state.source() if state else '') or 'the script'}: {what} {repo_id} is fetched from "
        "the Hub for the GPU at hand, and nothing says what it takes of the GPU's memory",
        hint,
    )
