"""Answers of a sweep in a folder: what is there is not captured again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memplan.sweep.answer import Kept
from memplan.types.errors import FormatError, UsageError
from memplan.types.output_file import write_file


class Store:
    """A folder with a file for each answer. What had no answer (`failed`) is not taken for one, nor
    is an answer whose plan is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / "answers" / f"{key}.json"

    def plan_path(self, key: str) -> Path:
        return self.folder / "plans" / f"{key}.plan"

    def load(self, key: str) -> Kept | None:
        """Raises FormatError for a file that is no answer, UsageError for what cannot be read."""
        try:
            encoded = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(
                f"{self.path(key)} cannot be read: {error.strerror}", "another folder after -o"
            ) from error
        try:
            kept = msgspec.json.decode(encoded, type=Kept)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(
                f"{self.path(key)} is not an answer of a sweep: {error}", "remove the file"
            ) from error
        if kept.status in ("failed", "not_done"):
            return None
        if kept.plan is None:
            return kept
        plan = self.plan_path(key)  # the folder may have moved
        return msgspec.structs.replace(kept, plan=str(plan)) if plan.is_file() else None

    def save(self, key: str, kept: Kept) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, [msgspec.json.encode(kept)], overwrite=True)
