"""RAM of the node that needs most: sums over its ranks, by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memplan.estimation import estimate
from memplan.types.estimate import Estimate
from memplan.worker.rank_choice import Requests
from memplan.worker.rank_host import HostBytes, node_host
from memplan.worker.ranks import CapturedRank, RankCaptures
from memplan.worker.request import Question
from tests.estimation.jobs import training_job

BASE = estimate(training_job())


def no_question(rank: int) -> Question:
    raise AssertionError(f"rank {rank} is not captured here")


def rank(peak: int | None) -> Estimate:
    low, high = (None, None) if peak is None else (peak - 1, peak + 2)
    return msgspec.structs.replace(
        BASE, host_peak_bytes=peak, host_low_bytes=low, host_high_bytes=high
    )


def test_ranks_between_two_captured_need_what_the_larger_does() -> None:
    captured = {0: rank(50), 1: rank(10), 7: rank(20)}
    assert node_host(captured, 8, 8) == HostBytes(50 + 10 + 6 * 20, 172, 196)


def test_the_node_that_needs_most() -> None:
    captured = {0: rank(10), 4: rank(10), 5: rank(90), 15: rank(10)}
    # Ranks 8 to 14 are taken to be like rank 5: the second node, then.
    assert node_host(captured, 16, 8) == HostBytes(7 * 90 + 10, 632, 656)
    first = {0: rank(100), 1: rank(10), 15: rank(10)}
    assert node_host(first, 16, 8) == HostBytes(170, 162, 186)


def test_no_sum_without_the_host_of_each() -> None:
    assert node_host({0: rank(10), 1: rank(None)}, 2, 2) is None
    assert node_host({0: rank(10)}, 2, 2) is None


def test_the_answer_of_several_ranks_has_them_all() -> None:
    captures = RankCaptures(4, no_question)
    for number, peak in ((0, 50), (3, 20)):
        one = msgspec.structs.replace(
            rank(peak), host_processes=4, host_pinned_peak_bytes=peak // 10, rank=number
        )
        requests = Requests(1, b"alike", one.high_bytes)
        captures.seen.captured[number] = CapturedRank(number, "why", one, requests, Path("none"))
    answer = captures.answer()
    assert [item.host_peak_bytes for item in answer.ranks] == [50, 20]
    assert [item.host_pinned_peak_bytes for item in answer.ranks] == [5, 2]
    assert answer.host_node_peak_bytes == 3 * 50 + 20
    assert (answer.host_node_low_bytes, answer.host_node_high_bytes) == (166, 178)
