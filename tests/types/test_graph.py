from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memplan.types.graph import Graph
from tests.order.graphs import make_graph


def chain() -> Graph:
    """op0 makes a value for op1 and op2; op2 runs after op1."""
    return make_graph([[], [], [1]], [(8, 0, [1, 2], False), (4, -1, [2], True)])


def column(*rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(rows, np.int64)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (replace(chain(), maker=column(0)), "column maker has 1 rows instead of 2"),
        (replace(chain(), value_name=["x"]), "column value_name has 1 rows instead of 2"),
        (replace(chain(), users_start=column(0, 2)), "the rows of users do not fit"),
        (replace(chain(), users_start=column(0, 4, 3)), "the rows of users do not fit"),
        (replace(chain(), users=column(1, 3, 2)), "users names an operator that does not exist"),
        (replace(chain(), users=column(2, 1, 2)), "the rows of users are not ascending"),
        (replace(chain(), users=column(1, 1, 2)), "the rows of users are not ascending"),
        (replace(chain(), bytes=column(8, -4)), "negative bytes"),
        (replace(chain(), scratch=column(0, -1, 0)), "negative bytes"),
        (replace(chain(), base_bytes=-1), "negative bytes"),
        (replace(chain(), maker=column(3, -1)), "a maker that does not exist"),
        (replace(chain(), before=column(2, 0, 1)), "operator 1 must run after operator 2, which"),
        (replace(chain(), before=column(1, 0, 1)), "operator 1 must run after operator 1, which"),
        (replace(chain(), maker=column(1, -1)), "operator 1 uses value 0 before it is made"),
        (
            replace(chain(), before_start=column(0, 0, 1, 2), before=column(0, 1)),
            "operator 2 uses value 0 and need not run after its maker",
        ),
    ],
)
def test_columns_that_contradict_each_other(wrong: Graph, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        wrong.check()


def test_rows() -> None:
    graph = chain()
    graph.check()
    assert (len(graph), graph.values) == (3, 2)
    assert graph.before_of(2).tolist() == [0, 1]
    assert graph.users_of(0).tolist() == [1, 2]
    assert make_graph([], []).values == 0
