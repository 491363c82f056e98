"""What requests on other batches ask for, from those on a few."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memplan.simulate.sizes import Sizes

LENGTHS = (40, 75, 111, 160, 203, 311, 512)


def rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def learned(asked: Callable[[int], float], lengths: tuple[int, ...] = LENGTHS) -> Sizes:
    """From texts of 24 bytes for each token."""
    known = np.array([[float(asked(length))] for length in lengths])
    return Sizes(np.array(lengths) * 24, np.array(lengths, float)[:, None], known)


def foretold(sizes: Sizes, length: int) -> list[int]:
    """Expected, low and high."""
    return np.rint(sizes.of(length * 24, np.array([float(length)]))[:, 0]).astype(int).tolist()


@pytest.mark.parametrize(
    "asked",
    [
        lambda length: 4096,
        lambda length: 1000 + 512 * length,
        lambda length: 4 * 8 * length**2 + 16 * (length - 1),
        lambda length: 4 * 8 * length * rounded_up(length, 16),
        lambda length: 256 * rounded_up(length, 32),
        lambda length: 64 * rounded_up(length, 2) ** 2,
        lambda length: min(2048 * rounded_up(length, 8), 2048 * 250),
    ],
)
def test_to_the_byte(asked: Callable[[int], int]) -> None:
    sizes = learned(asked)
    for length in range(LENGTHS[0], LENGTHS[-1] + 1):
        assert foretold(sizes, length) == [asked(length)] * 3


def test_two_dimensions() -> None:
    """Batches of about as many tokens: many short texts, or few long ones."""
    shapes = [(40, 100), (26, 150), (20, 200), (13, 300), (10, 390), (8, 500), (39, 102)]

    def asked(texts: int, length: int) -> list[float]:
        return [4 * texts * length, 8 * texts * length * rounded_up(length, 16), 4 * texts]

    shapes.sort(key=lambda shape: shape[0] * shape[1])
    at = np.array([8 * texts * length for texts, length in shapes])
    sizes = Sizes(at, np.array(shapes, float), np.array([asked(*shape) for shape in shapes]))
    for texts, length in [(30, 133), (16, 250), (9, 444)]:
        found = sizes.of(8 * texts * length, np.array([texts, length], float))
        assert np.allclose(found, asked(texts, length), atol=0.5)


def test_pictures() -> None:
    """Two convolutions of stride 2, with workspaces for what they read and what they make."""
    shapes = [(120, 333), (150, 301), (171, 222), (222, 199), (256, 256), (301, 280), (333, 331)]

    def asked(height: int, width: int) -> list[float]:
        first = -(-height // 2) * -(-width // 2)
        second = -(-height // 4) * -(-width // 4)
        read = height * width
        return [first * 64, second * 128, read * 16 + first * 64 + 999, first * 64 + second * 128]

    at = np.array([12 * height * width for height, width in shapes])
    sizes = Sizes(at, np.array(shapes, float), np.array([asked(*one) for one in shapes]))
    for height, width in [(131, 320), (200, 201), (299, 303)]:
        found = sizes.of(12 * height * width, np.array([height, width], float))
        assert np.allclose(found, asked(height, width), atol=0.5)


def test_what_all_samples_have_in_common_scales_with_the_batch() -> None:
    """A last batch may have fewer texts."""
    dims = np.array([[8.0, length] for length in LENGTHS])
    known = np.array([[8.0 * length * 100] for length in LENGTHS])
    sizes = Sizes(np.array(LENGTHS) * 64, dims, known)
    assert sizes.of(3 * 8 * 200, np.array([3.0, 200.0]))[0, 0] == pytest.approx(3 * 200 * 100)


def test_what_no_curve_gives_has_bounds_that_hold() -> None:
    def asked(length: int) -> int:
        return length**2 * 4 // 512 * 512 + 512 * (length % 7)

    sizes = learned(asked)
    inside = 0
    for length in range(LENGTHS[0], LENGTHS[-1] + 1):
        expected, low, high = foretold(sizes, length)
        inside += low - 1 <= asked(length) <= high + 1
        assert low <= expected <= high
        assert abs(expected - asked(length)) < 8192  # no line between two samples comes so near
    assert inside / (LENGTHS[-1] + 1 - LENGTHS[0]) > 0.9


def test_two_samples_alone_bound_what_is_between() -> None:
    sizes = learned(lambda length: length**2, (100, 200))
    expected, low, high = foretold(sizes, 150)
    assert low <= 150**2 <= high and low <= expected <= high
    assert foretold(sizes, 200) == [200**2] * 3
