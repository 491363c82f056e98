"""Options of other programs' command lines: enough of a table to find where they end."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from memplan.capturing.options import OUR_OPTIONS
from memplan.types.errors import UsageError

Given = dict[str, list[str]]
"""Values by the option's key, in the order given; a flag has empty ones."""


@dataclass(frozen=True)
class Option:
    """An option that takes `values` words; -1: one that is attached (`--x=1`, `-x1`), or none."""

    key: str
    values: int


class OptionTable:
    """The options of one launcher.

    Each argument lists options between spaces, the names of one option joined by `|`; its key is
    the first long name without its dashes. `values`, `flags`, `attached` and `pairs` take one word,
    none, one only if attached, and two. `underscores`: `--a_b` is `--a-b`. `long`: an option with
    one dash may be longer than a letter, as in `-np 8`.
    """

    def __init__(
        self,
        launcher: str,
        *,
        values: str,
        flags: str = "",
        attached: str = "",
        pairs: str = "",
        underscores: bool = False,
        long: bool = False,
    ) -> None:
        self.launcher = launcher
        self.names: dict[str, Option] = {}
        self._underscores = underscores
        self._long = long
        for text, count in ((values, 1), (flags, 0), (attached, -1), (pairs, 2)):
            for group in text.split():
                names = group.split("|")
                key = next((n for n in names if n.startswith("--")), names[0]).lstrip("-")
                self.names |= dict.fromkeys(names, Option(key, count))

    def read(self, words: list[str]) -> tuple[Given, list[str]]:
        """The options given, and the words from the first that is none on.

        Raises UsageError for an unknown option and for one without its value.
        """
        given: Given = {}
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] != "-":
            word = words[index]
            index += 1
            if word == "--":
                break
            for option, name, value in self._split(word):
                index += self._take(given, option, name, value, words[index:])
        return given, words[index:]

    def _take(
        self, given: Given, option: Option, name: str, value: str | None, rest: list[str]
    ) -> int:
        """Note an option and its values; how many further words it took."""
        wanted = 0 if option.values < 1 or value is not None else option.values
        if len(rest) < wanted:
            what = "a value" if wanted == 1 else f"{wanted} values"
            raise UsageError(f"{self.launcher}: {name} needs {what}", f"{self.launcher} --help")
        text = value if value is not None else "=".join(rest[:wanted])
        given.setdefault(option.key, []).append(text)
        return wanted

    def _split(self, word: str) -> list[tuple[Option, str, str | None]]:
        """The options of one word with the name used, and a value that is attached."""
        name, equals, value = word.partition("=")
        if word.startswith("--") or (self._long and name in self.names):
            option = self._find(name)
            if equals and option.values == 0:
                raise UsageError(f"{self.launcher}: {name} takes no value", name)
            return [(option, name, value if equals else None)]
        found: list[tuple[Option, str, str | None]] = []
        for position, letter in enumerate(word[1:], start=2):
            option = self._find(f"-{letter}", word)
            rest = word[position:] if option.values else ""
            found.append((option, f"-{letter}", rest.removeprefix("=") or None))
            if rest:
                break
        return found

    def _find(self, name: str, word: str = "") -> Option:
        if self._underscores:
            name = name.replace("_", "-")
        if name in self.names:
            return self.names[name]
        # As getopt_long and argparse do: a beginning that only one option has.
        begun = {o.key: o for n, o in self.names.items() if n.startswith(name) and len(name) > 2}
        if len(begun) == 1 and name.startswith("--"):
            return next(iter(begun.values()))
        if name in OUR_OPTIONS:
            raise UsageError(
                f"{self.launcher}: no option {word or name}",
                f"{name} before {self.launcher}, where memplan's own options stand: "
                f"memplan estimate {name} … {self.launcher} …",
            )
        near = difflib.get_close_matches(name, self.names, n=1)
        raise UsageError(
            f"{self.launcher}: no option {word or name}",
            near[0] if near else f"{self.launcher} --help",
        )


def last(given: Given, key: str, default: str = "") -> str:
    """The value that counts: the last one given."""
    return given[key][-1] if given.get(key) else default


def whole(launcher: str, option: str, text: str, *, least: int = 1) -> int:
    """A whole number of at least `least`. Raises UsageError."""
    if not text.isdecimal() or int(text) < least:
        raise UsageError(
            f"{launcher}: {option} {text!r} is not a whole number from {least} on", f"{option} 8"
        )
    return int(text)
