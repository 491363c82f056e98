"""What a step asks for, as a function of its batch: learned from steps on a few batches.

A tensor's size is a product of dimensions, and those that differ between batches are known. Some
are rounded up to a multiple on the way: attention pads its mask to 8, a strided convolution
halves its input. So for each request a small polynomial of the dimensions, rounded or not, is
looked for that gives every captured size to the byte, with a sample to spare. Where there is none,
a size is that of the curve that comes nearest, or lies between those of the next smaller and the
next larger batch, whichever misses the captured ones by less; its bounds say by how much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64

F64 = npt.NDArray[np.float64]
_MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)
_EXACT = 0.5
"""Bytes."""
_SAFE = 2.0
"""A curve misses what it was not fitted to by more than what it was."""


_Power = tuple[int, int, int]
"""A dimension, the multiple that it is rounded up to, and how often it is a factor."""


@dataclass(frozen=True)
class _Terms:
    """The terms of a polynomial, each a product of powers."""

    products: tuple[tuple[_Power, ...], ...]

    def __call__(self, dims: F64) -> F64:
        """The terms' values, by batch and term; `dims` are by batch and dimension."""
        made = np.ones((len(dims), len(self.products)))
        for term, powers in enumerate(self.products):
            for of, multiple, power in powers:
                made[:, term] *= (np.ceil(dims[:, of] / multiple) * multiple) ** power
        return made

    @property
    def plain(self) -> bool:
        return all(multiple == 1 for powers in self.products for _, multiple, _ in powers)


def _terms(dimensions: int) -> Iterator[_Terms]:
    """The simplest first. Of those that differ in dimensions which the samples have in common, a
    last batch with fewer texts, the one with most: what a job makes of a batch is made of each."""
    yield _Terms(((),))
    every = range(dimensions)
    rest: list[tuple[tuple[_Power, ...], int]] = [
        (tuple((one, 1, 1) for one in factors), of)
        for count in reversed(range(3))
        for of in every
        for factors in combinations([one for one in every if one != of], count)
    ]
    for factors, of in rest:
        yield _Terms((factors, (*factors, (of, 1, 1))))
    for factors, of in rest:
        yield _Terms((factors, (*factors, (of, 1, 1)), (*factors, (of, 1, 2))))
    for multiple in _MULTIPLES:
        for factors, of in rest:
            rounded = (*factors, (of, multiple, 1))
            yield _Terms((factors, rounded))
            yield _Terms((rounded, (*rounded, (of, 1, 1))))
            yield _Terms((factors, rounded, (*factors, (of, multiple, 2))))
    yield from _areas(dimensions)


def _areas(dimensions: int) -> Iterator[_Terms]:
    """Terms for image areas: a convolution of stride 2 halves each side, rounded up, and its
    workspace may hold its input and its output."""
    every = range(dimensions)
    for multiple in (1, *_MULTIPLES[:4]):
        for sides in combinations_with_replacement(every, 2):
            for factor in (None, *(one for one in every if one not in sides)):
                lead: tuple[_Power, ...] = () if factor is None else ((factor, 1, 1),)
                read = (*lead, *((side, multiple, 1) for side in sides))
                made = (*lead, *((side, 2 * multiple, 1) for side in sides))
                yield _Terms(((), read))
                yield _Terms(((), read, made))


class Sizes:
    """Bytes of many requests by batch."""

    def __init__(self, at: I64, dims: F64, known: F64) -> None:
        """Fit models to batches of rising, different sizes `at` in bytes. `dims`: their dimensions,
        by batch and dimension. `known`: requested bytes, by batch and request; NaN where a batch
        has no such request."""
        alike, of = np.unique(known, axis=1, return_inverse=True)
        self._of = of.ravel()
        """For each request its column in `alike`, because layers have equal requests."""
        self._count = alike.shape[1]
        self._fitted: list[_Fitted] = []
        self._between: list[_Between] = []
        patterns, of = np.unique(~np.isnan(alike), axis=1, return_inverse=True)
        for number, there in enumerate(patterns.T):
            columns = np.flatnonzero(of.ravel() == number)
            left = self._fit(dims[there], alike[there], columns)
            if len(left):
                left = self._fit_capped(dims[there], alike[there], left)
            if len(left):
                self._near(at[there], dims[there], alike[there], left)

    def _fit(self, dims: F64, known: F64, columns: I64) -> I64:
        """The columns for which no model was found."""
        for terms in _terms(dims.shape[1]):
            curve = _curve(terms, dims, known[:, columns], spare=1)
            if curve is None:
                continue
            factors, missed = curve
            exact = missed < _EXACT
            if exact.any():
                self._fitted.append(_Fitted(terms, columns[exact], factors[:, exact]))
                columns = columns[~exact]
            if not len(columns):
                break
        return columns

    def _fit_capped(self, dims: F64, known: F64, columns: I64) -> I64:
        """The same for what grows up to a bound: a reduction's blocks are only so many."""
        bound = known[:, columns].max(axis=0)
        patterns, of = np.unique(known[:, columns] < bound, axis=1, return_inverse=True)
        for number, below in enumerate(patterns.T):
            fitted = len(self._fitted)
            self._fit(dims[below], known[below], columns[of.ravel() == number])
            for place, one in enumerate(self._fitted[fitted:], fitted):
                beyond = one.terms(dims[~below]) @ one.factors
                capped = (beyond > known[:, one.columns].max(axis=0) - _EXACT).all(axis=0)
                self._fitted[place] = replace(
                    one,
                    columns=one.columns[capped],
                    factors=one.factors[:, capped],
                    bound=known[:, one.columns[capped]].max(axis=0),
                )
        done = [one.columns for one in self._fitted]
        return columns[~np.isin(columns, np.concatenate(done))] if done else columns

    def _near(self, at: I64, dims: F64, known: F64, columns: I64) -> None:
        """The same, where nothing is exact."""
        line = _Between(at, columns, known[:, columns])
        least, best = line.missed, np.full(len(columns), -1)
        curves: list[tuple[_Terms, F64]] = []
        for terms in _terms(dims.shape[1]):
            curve = _curve(terms, dims, known[:, columns], spare=2) if terms.plain else None
            if curve is not None:
                missed = _SAFE * curve[1]
                best[missed < least] = len(curves)
                least = np.minimum(missed, least)
                curves.append((terms, curve[0]))
        for number in np.unique(best).tolist():
            of = best == number
            if number < 0:
                self._between.append(_Between(at, columns[of], known[:, columns[of]]))
            else:
                terms, factors = curves[number]
                self._fitted.append(_Fitted(terms, columns[of], factors[:, of], least[of]))

    def of(self, size: int, dims: F64) -> F64:
        """Expected, low and high bytes of each request, for a batch of this size and dimensions."""
        found = np.zeros((3, self._count))
        for one in self._fitted:
            value = np.minimum(one.terms(dims[None])[0] @ one.factors, one.bound)
            found[:, one.columns] = value, value - one.missed, value + one.missed
        for between in self._between:
            found[:, between.columns] = between.at(size)
        expanded: F64 = np.maximum(found, 0.0)[:, self._of]
        return expanded


@dataclass(frozen=True)
class _Fitted:
    terms: _Terms
    columns: I64
    factors: F64
    """The factors, by term and column."""
    missed: F64 | float = 0.0
    """The error of each column, in bytes."""
    bound: F64 | float = np.inf
    """The most bytes of each column."""


def _curve(terms: _Terms, dims: F64, known: F64, *, spare: int) -> tuple[F64, F64] | None:
    """The factors that come nearest to what is known, by term and column, and by how much they
    miss it at most; None where there are not so many samples more than terms."""
    made = terms(dims)
    scale = made.max(axis=0, initial=1.0)
    if len(made) < made.shape[1] + spare or np.linalg.matrix_rank(made / scale) < made.shape[1]:
        return None
    found = np.linalg.lstsq(made / scale, known, rcond=None)[0]
    return found / scale[:, None], np.abs(made / scale @ found - known).max(axis=0)


class _Between:
    """What lies between known values, or beyond them at the nearest."""

    def __init__(self, at: I64, columns: I64, known: F64) -> None:
        self._at, self.columns, self._known = at, columns, known
        # By how much they miss each known value if it is left out; of two both are needed.
        inner = range(1, len(at) - 1)
        without = [self._line(at[one], one - 1, one + 1) - known[one] for one in inner]
        alone = np.full(known.shape[1], np.inf if len(at) > 1 else 0.0)
        self.missed = np.abs(without).max(axis=0) if without else alone

    def _line(self, size: int, left: int, right: int) -> F64:
        low, high = self._at[left], self._at[right]
        share = min(max((size - low) / (high - low), 0.0), 1.0)
        line: F64 = self._known[left] + share * (self._known[right] - self._known[left])
        return line

    def at(self, size: int) -> F64:
        """Expected, low and high, by column."""
        last = len(self._at) - 1
        right = min(max(int(np.searchsorted(self._at, size)), min(1, last)), last)
        left = max(right - 1, 0)
        value = self._line(size, left, right) if last else self._known[0]
        if size in self._at:
            return np.stack([value] * 3)
        ends = self._known[[left, right]]
        low = np.maximum(value - self.missed, ends.min(axis=0))
        high = np.minimum(value + self.missed, ends.max(axis=0))
        return np.stack([value, np.minimum(low, value), np.maximum(high, value)])
