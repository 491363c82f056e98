"""Problems for tests, random ones and hand-made ones."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from memplan.layout.problem import Problem, make_problem


@st.composite
def problems(draw: st.DrawFn, most: int = 14) -> Problem:
    """Few moments and few sizes, so that buffers meet and sizes repeat; some aligned."""
    count = draw(st.integers(1, most))
    rows = st.tuples(
        st.integers(0, 12), st.integers(1, 6), st.integers(1, 9), st.sampled_from((1, 1, 1, 2, 4))
    )
    drawn = np.array(draw(st.lists(rows, min_size=count, max_size=count)), np.int64)
    return make_problem(drawn[:, 0], drawn[:, 0] + drawn[:, 1], drawn[:, 2], alignment=drawn[:, 3])


def best_height(problem: Problem) -> int:
    """The least height of a small problem without fixed buffers, by trying every order: each
    buffer in turn to the lowest place that is free (the leftmost layouts hold an optimum)."""
    rows = list(
        zip(
            problem.lower.tolist(), problem.upper.tolist(), problem.size.tolist(),
            problem.alignment.tolist(), strict=True,
        )
    )  # fmt: skip
    best = sum(size + alignment for _, _, size, alignment in rows)

    def place(left: list[int], placed: list[tuple[int, int, int, int]], height: int) -> None:
        nonlocal best
        if height >= best:
            return
        if not left:
            best = height
            return
        for row in left:
            lower, upper, size, step = rows[row]
            taken = sorted((s, e) for a, b, s, e in placed if lower < b and a < upper)
            offset = 0
            for start, end in taken:
                if offset + size <= start:
                    break
                offset = max(offset, -(-end // step) * step)
            rest = [other for other in left if other != row]
            place(
                rest, [*placed, (lower, upper, offset, offset + size)], max(height, offset + size)
            )

    place(list(range(len(rows))), [], 0)
    return best
