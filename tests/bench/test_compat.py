"""The support matrix: which builds are tried, and what becomes of earlier rows."""

from __future__ import annotations

import platform

import pytest

from bench.compat import Build, choose, empty_row, merged, table

KNOWN = ["2.15.0", "2.14.1", "2.13.0+cpu", "2.13.0", "2.12.1", "2.12.0", "2.1.2", "2.1.0"]


@pytest.mark.parametrize(
    ("asked", "build"),
    [
        ("2.13", Build("2.13.0+cpu", cuda=False)),
        ("2.12", Build("2.12.1", cuda=True)),
        ("2.1", Build("2.1.2", cuda=True)),
        ("newest", Build("2.15.0", cuda=True)),
        ("2.11", None),
    ],
)
def test_the_build_of_a_release(
    asked: str, build: Build | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert choose(asked, KNOWN) == build
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert (choose(asked, KNOWN) or Build("", cuda=False)).cuda is False


def test_rows_are_replaced_one_by_one() -> None:
    ran = empty_row(Build("2.12.1", cuda=True)) | {"result": "works", "date": "2026-01-01"}
    not_run = empty_row(Build("2.12.1", cuda=True)) | {"detail": "no CPU build"}
    cpu = empty_row(Build("2.9.0+cpu", cuda=False)) | {"result": "fails", "detail": "a|b"}
    assert merged([not_run, cpu], [ran]) == [cpu, ran], "what was run stays"
    assert merged([ran], [not_run]) == [ran]
    with_gpu = ran | {"gpu": "NVIDIA L4"}
    assert merged([with_gpu], [ran]) == [with_gpu, ran]
    again = ran | {"date": "2026-02-02"}
    assert merged([again], [ran, cpu]) == [cpu, again]
    lines = table([cpu, ran]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "fails: a/b" in lines[2] and "| – |" in lines[2]
