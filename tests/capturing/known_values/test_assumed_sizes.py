"""What a mask selects that nobody knows may be more than is assumed: high bounds hold all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memplan.estimation import estimate
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Provenance, Trace
from tests.capturing.jobs import record

POINTS, WIDTH = 1 << 20, 64
ROW = 4 * WIDTH


def samples(times: int = 1) -> None:
    """Points of which a grid that was learned keeps some."""
    points = torch.randn(POINTS, WIDTH, device="cuda", requires_grad=True)
    keep = points.sum(1) > 0
    kept = points[keep]
    for _ in range(times - 1):
        kept = kept[kept.sum(1) > 0]
    back = torch.zeros(POINTS, device="cuda")
    back[keep if times == 1 else slice(len(kept))] = kept.exp().sum(1)
    back.sum().backward()


def bounds(trace: Trace, op: str = "") -> set[tuple[int, int]]:
    return {
        (event.bytes, int(trace.events.bytes_high[event.index]))
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.provenance == Provenance.ASSUMED
        and op in event.op
    }


def test_selected_rows_may_be_all_rows() -> None:
    index = 8
    assert bounds(record(samples)) == {
        (POINTS // 2 * size, POINTS * size) for size in (ROW, index, 4)
    }


def test_rows_selected_twice_may_still_be_all() -> None:
    assert (POINTS // 4 * ROW, POINTS * ROW) in bounds(record(lambda: samples(2)))


def test_the_rest_of_what_a_mask_selects_may_be_all_rows() -> None:
    def job() -> None:
        points = torch.randn(POINTS - 2, WIDTH, device="cuda")
        kept = points[points.sum(1) > 0]  # an odd number: the rest is one row less
        again = kept.sum(1) > 0
        kept[again].sum()
        kept[~again].exp()

    assert bounds(record(job), "exp") == {((POINTS // 4 - 1) * ROW, (POINTS - 2) * ROW)}


def test_gradients_of_weights_have_the_weights_rows() -> None:
    """As many channels as rows are assumed to be selected."""

    def job() -> None:
        convolution = torch.nn.Conv2d(16, 64, 3, device="cuda")
        linear = torch.nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD((*convolution.parameters(), *linear.parameters()), momentum=0.9)
        for _ in range(2):
            rows = convolution(torch.randn(128, 16, 3, 3, device="cuda")).flatten(1)
            linear(rows[rows.sum(1) > 0]).exp().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    for op in ("convolution_backward", "_foreach", "clone"):
        assert not bounds(trace, op)
    assert bounds(trace, "addmm") == {(64 * ROW, 128 * ROW)}
    # A backward pass has two products: the gradients of the rows, and of the weight.
    assert [one.op for one in trace if one.provenance == Provenance.ASSUMED].count(
        "aten.mm.default"
    ) == 2


def test_of_two_masks_that_select_as_many_the_larger_counts() -> None:
    def job() -> None:
        half, whole = (torch.randn(n, WIDTH, device="cuda") for n in (POINTS // 2, POINTS))
        kept = whole[whole.sum(1) > 0]
        torch.add(kept[kept.sum(1) > 0], half[half.sum(1) > 0])

    assert bounds(record(job), "add") == {(POINTS // 4 * ROW, POINTS * ROW)}


def test_the_rest_is_told_from_what_is_known() -> None:
    """The mask's complement counts, too; a mask of known values does not."""

    def job() -> None:
        points = torch.randn(POINTS, WIDTH, device="cuda")
        assumed = points.sum(1) > 0
        known = torch.arange(POINTS, device="cuda") % 4 == 0
        points[assumed].exp()
        for mask in (~assumed, assumed & known, known):
            points[mask].exp()

    large = {pair for pair in bounds(record(job)) if pair[1] == POINTS * ROW}
    assert {pair[0] for pair in large} == {POINTS // 2 * ROW, POINTS // 4 * ROW}


@pytest.mark.parametrize("times", [1, 2])
def test_the_interval_holds_a_run_in_which_all_are_selected(times: int) -> None:
    card = find_profile("a100-80gb")
    even, worst = (
        estimate(record(lambda: samples(times), routing=routing), card)
        for routing in ("balanced", "worst")
    )
    assert even.peak_bytes < worst.peak_bytes
    assert even.high_bytes > worst.peak_bytes
    assert not bounds(record(samples, routing="worst"))


def test_rows_lie_in_any_dimension_and_are_merged() -> None:
    """Pixels by the points that are in front of the camera; samples of rays that hit something."""
    pixels, samples = 7, 3

    def job() -> None:
        points = torch.randn(POINTS, WIDTH, device="cuda")
        kept = points[points.sum(1) > 0]
        pixel = torch.randn(pixels, 1, WIDTH, device="cuda")
        distances = pixel - kept[None]
        torch.bmm(distances.view(-1, 1, WIDTH), distances.view(-1, WIDTH, 1)).view(pixels, -1).exp()
        rays = kept[:, None, :4] + torch.randn(samples, 4, device="cuda")
        torch.nn.functional.linear(rays.view(-1, 4), torch.randn(5, 4, device="cuda"))

    trace = record(job)
    half = POINTS // 2
    assert bounds(trace, "sub") == {(pixels * half * ROW, pixels * POINTS * ROW)}
    assert bounds(trace, "exp") == {(pixels * half * 4, pixels * POINTS * 4)}
    assert bounds(trace, "mm") >= {(samples * half * 5 * 4, samples * POINTS * 5 * 4)}


def test_pairs_of_selected_rows_and_channels_that_are_as_many() -> None:
    rows = 256

    def job() -> None:
        x, weight = (torch.randn(more * rows, rows, device="cuda") for more in (2, 1))
        kept = x[x.sum(1) > 0]
        torch.nn.functional.linear(kept, weight).exp()
        torch.cdist(kept[:, :3], kept[:, :3], compute_mode="donot_use_mm_for_euclid_dist").sin()

    once, twice = (rows * rows * 4 * more for more in (2, 4))
    assert bounds(record(job), "exp") == {(rows * rows * 4, once)}
    assert bounds(record(job), "sin") == {(rows * rows * 4, twice)}


def test_the_most_rows_of_what_is_joined_add_up() -> None:
    """What two masks select; a model's points and those that are cloned."""

    def job() -> None:
        points = torch.randn(POINTS, WIDTH, device="cuda")
        other = torch.randn(POINTS // 4, WIDTH, device="cuda")
        kept, also = points[points.sum(1) > 0], other[other.sum(1) > 0]
        torch.cat([kept, also]).exp()
        torch.cat([kept.t(), points.t()], dim=1).sin()

    trace = record(job)
    assert bounds(trace, "exp") == {(POINTS // 8 * 5 * ROW, POINTS // 4 * 5 * ROW)}
    assert bounds(trace, "sin") == {(POINTS // 2 * 3 * ROW, POINTS * 2 * ROW)}


@pytest.mark.parametrize(
    "made",
    [
        lambda points, keep: torch.zeros(len(points[keep]), WIDTH, device="cuda"),
        lambda points, keep: points.new_zeros(points[keep].shape[0], WIDTH),
        lambda points, keep: torch.zeros(int(keep.sum()), WIDTH, device="cuda"),
        lambda points, keep: torch.zeros(keep.count_nonzero().item(), WIDTH, device="cuda"),
    ],
)
def test_what_is_made_from_a_number_of_rows_may_have_all_rows(
    made: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    def job() -> None:
        points = torch.randn(POINTS, WIDTH, device="cuda")
        made(points, points.sum(1) > 0).exp()
        torch.zeros(POINTS // 4, WIDTH, device="cuda").cos()

    trace = record(job)
    of_all = {(POINTS // 2 * ROW, POINTS * ROW)}
    assert bounds(trace, "zeros") == bounds(trace, "exp") == of_all
    assert not bounds(trace, "cos"), "a number that no mask selects"


def test_the_largest_count_may_be_all_elements() -> None:
    def job() -> None:
        tokens = torch.randn(8, 1024, 2, device="cuda")
        lengths = (tokens.sum(2) > 0).long().sum(dim=1)
        tokens[:, : lengths.max().item()].exp()

    (made,) = [one for one in record(job) if "exp" in one.op and one.kind == EventKind.ALLOC]
    assert made.bytes == 4 * 8 * 1024 * 2
