"""What is said of errors of others."""

from __future__ import annotations

import pytest

from memplan.types.errors import first_line


def test_an_error_that_says_nothing_is_its_line_of_code() -> None:
    nothing: list[int] = []
    for added in ("", "AssertionError: ", "\n\nfrom user code:\n  File train.py, line 3"):
        with pytest.raises(AssertionError) as caught:
            assert nothing, added
        caught.value.args = (added,)
        assert first_line(caught.value).startswith("`assert nothing, added` in ")
        assert "test_errors.py:" in first_line(caught.value)
    assert first_line(KeyError()) == "KeyError"


def test_the_first_line_of_one_that_does() -> None:
    with pytest.raises(ValueError, match="shapes") as caught:
        raise ValueError("\nshapes differ\nfrom user code:\n  x + y")
    assert first_line(caught.value) == "shapes differ"
