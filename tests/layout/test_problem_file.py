"""Problem files: MiniMalloc's CSV comes in and goes out; every fault is named with its row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.layout.greedy import greedy_by_size
from memplan.layout import problem_file
from memplan.layout.problem_file import read_problem, write_layout
from memplan.types.errors import FormatError, UsageError
from tests.oracles.layout_fault import validate

HEADER = "id,lower,upper,size\n"


def written(tmp_path: Path, content: bytes | str) -> Path:
    path = tmp_path / "problem.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_columns_in_any_order_with_a_bom_and_crlf(tmp_path: Path) -> None:
    text = "\ufeffsize,id,Upper,lower,offset,alignment\r\n7, x ,5,2,,\r\n\r\n8,y,9,5,16,8\r\n"
    problem = read_problem(written(tmp_path, text.encode("utf-8")))
    assert problem.ids == ("x", "y")
    columns = (problem.lower, problem.upper, problem.size, problem.alignment, problem.fixed)
    assert [column.tolist() for column in columns] == [[2, 5], [5, 9], [7, 8], [1, 8], [-1, 16]]
    assert problem.max_load == 8 and problem.lower_bound == 24


def test_what_is_written_is_a_problem_whose_offsets_are_fixed(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, HEADER + "a,0,4,10\nb,2,6,20\nc,5,9,30\n"))
    layout = greedy_by_size(problem)
    out = tmp_path / "out.csv"
    write_layout(problem, layout, out)
    assert out.read_text().startswith("id,lower,upper,size,offset\na,0,4,10,")
    again = read_problem(out)
    assert np.array_equal(again.fixed, layout.offsets)
    assert validate(again, layout.offsets) == ""
    with pytest.raises(UsageError, match="exists"):
        write_layout(problem, layout, out)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (HEADER, "no buffers"),
        ("id,lower,upper\n0,1,2\n", "no column size"),
        ("0,1,2,3\n", "column '0' is not known"),
        ("id,lower,upper,size,gaps\n0,1,2,3,1-2\n", "column 'gaps' is not known"),
        ("id,start,end,size\n0,1,2,3\n", "column 'start' is not known"),
        ("id,lower,upper,size,size\n0,1,2,3,3\n", "size is there twice"),
        (HEADER + "0,1,2,3\n1,5,5,3\n", r"row 2 \(line 3\): lower 5 is not below upper 5"),
        (HEADER + "0,9,2,3\n", r"row 1 \(line 2\): lower 9 is not below upper 2"),
        (HEADER + "0,1,2,-3\n", r"row 1 \(line 2\): size -3 is not above 0"),
        (HEADER + "\n\n0,1,2,0\n", r"row 1 \(line 4\): size 0"),
        (HEADER + "0,1,2,9223372036854775808\n", "size is beyond 2.63"),
        (HEADER + "0,1,2," + "9" * 5000 + "\n", "size is beyond 2.63"),
        (HEADER + "0,-9223372036854775807,2,1\n", "row 1 .* lifetime .* out of range"),
        (HEADER + f"0,1,2,{2**62}\n1,8,9,{2**62}\n2,8,9,1\n", "row 2 .*sum to more than 2.63"),
        (HEADER + "x,1,2,3\ny,1,2,3\nx,4,5,6\n", r"row 3 \(line 4\): id 'x' is that of an earlier"),
        (HEADER + "0,1,2,3.5\n", "size '3.5' is not a whole number"),
        (HEADER + "0,1,2,1e9\n", "size '1e9' is not a whole number"),
        (HEADER + "0,1,,3\n", "row 1 .*no upper"),
        (HEADER + ",1,2,3\n", "row 1 .*no id"),
        (HEADER + "0,1,2\n", "row 1 .*3 fields, the header has 4"),
        (HEADER + '0,1,2,"3\n', "line"),
        ("id,lower,upper,size,alignment\n0,1,2,3,0\n", "alignment 0 is not above 0"),
        ("id,lower,upper,size,alignment,offset\n0,1,2,3,4,6\n", "offset 6 is no multiple"),
        ("id,lower,upper,size,offset\n0,1,2,3,-7\n", "offset -7 is negative"),
        (f"id,lower,upper,size,offset\n0,1,2,3,{2**63 - 2}\n", "beyond 2.63"),
        (b"\xff\xfe\x00i\x00d", "is no UTF-8"),
        (b"id,lower,upper,size\n\x00,1,2,3\n\x00,4,5,3\n", "problem.csv: "),
    ],
)
def test_every_fault_is_named(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says) as raised:
        read_problem(written(tmp_path, text))
    assert raised.value.exit_code == 2 and "problem.csv" in raised.value.message
    assert len(str(raised.value)) < 500


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEADER + "0,1,2,3\n1,1,2,3\n2,1,2,3\n")
    monkeypatch.setattr(problem_file, "MAX_ROWS", 2)
    with pytest.raises(FormatError, match="more than 2 buffers"):
        read_problem(path)
    monkeypatch.setattr(problem_file, "MAX_BYTES", 20)
    with pytest.raises(FormatError, match="more than 0 MiB"):
        read_problem(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_problem(tmp_path / "none.csv")


def test_real_problems_are_read(tmp_path: Path, memplan_test_data: Path) -> None:
    problem = read_problem(memplan_test_data / "packing" / "A.1048576.csv")
    assert len(problem) > 100 and problem.max_load <= 1 << 20
