"""A set of numbers and their neighbours, beside Python's own sets."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.types.allocation import RankSet


# On a busy machine the first draws alone may take a second.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from((1, 1024, 1025, 3_000_000)), st.data())
def test_neighbours(count: int, data: st.DataObject) -> None:
    # Numbers near one another and near the ends of words, so that both levels are crossed.
    near = st.sampled_from((0, 1, 1022, 1023, 1024, 1 << 20, count - 1))
    numbers = st.builds(lambda a, b: (a + b) % count, near, st.integers(0, 3))
    ranks, members = RankSet(count), set[int]()
    for number in data.draw(st.lists(numbers, max_size=30)):
        below = max((other for other in members if other < number), default=-1)
        above = min((other for other in members if other > number), default=-1)
        assert ranks.neighbours(number) == (below, above)
        if number in members:
            ranks.remove(number)
        else:
            ranks.add(number)
        members ^= {number}
