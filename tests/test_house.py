"""Promises that no single stage can keep alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICK_TO_START = [
    "memplan",
    "memplan.types",
    "memplan.phases",
    "memplan.simulate",
    "memplan.estimation",
    "memplan.report",
    "memplan.recompute",
    "memplan.layout",
    "memplan.cli",
    "memplan.cli.app",
    "memplan.capturing.options",
    "memplan.capturing.importers",
]


def test_importing_them_does_not_import_torch() -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""
    done = subprocess.run([sys.executable, "-c", code, *QUICK_TO_START], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_every_development_package_is_pinned_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin) for pin in pins)
    pinned = {_plain(pin.split("==")[0]) for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for group in project["dependency-groups"].values():
        wanted += [entry for entry in group if isinstance(entry, str)]
    assert {_plain(re.split(r"[<>=!~\[ ]", name)[0]) for name in wanted} <= pinned


def test_files_can_be_read_at_one_sitting() -> None:
    most = {ROOT / "README.md": 130}
    files = [ROOT / "README.md", *(ROOT / "src").rglob("*.py")]
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert [file for file, count in lines.items() if count > most.get(file, 450)] == []


def test_links_in_the_documentation_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
    links = {
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in link
    }
    assert len(links) > 50
    broken = [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]
    assert broken == []


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
