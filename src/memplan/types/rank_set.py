"""A set of small numbers that knows the neighbours of one, in a time that hardly grows."""

from __future__ import annotations

_BITS = 10
_LOW = (1 << _BITS) - 1
_BIT = [1 << bit for bit in range(1 << _BITS)]


class RankSet:
    """Some of the numbers below `count`, as bits: words of 1,024, and in each higher level a bit
    for every word below that holds any."""

    def __init__(self, count: int) -> None:
        self._levels: list[list[int]] = []
        while True:
            count = (count >> _BITS) + 1
            self._levels.append([0] * count)
            if count == 1:
                break

    def add(self, number: int) -> None:
        for words in self._levels:
            word = number >> _BITS
            words[word] |= _BIT[number & _LOW]
            number = word

    def remove(self, number: int) -> None:
        """It must be there."""
        for words in self._levels:
            word = number >> _BITS
            words[word] ^= _BIT[number & _LOW]
            if words[word]:
                return
            number = word

    def neighbours(self, number: int) -> tuple[int, int]:
        """The greatest member below a number and the least one above; -1 where there is none."""
        below, above = -1, -1
        for level, words in enumerate(self._levels):
            word, bit = number >> _BITS, number & _LOW
            if below < 0 and (lower := words[word] & (_BIT[bit] - 1)):
                below = self._descend((word << _BITS) + lower.bit_length() - 1, level, last=True)
            if above < 0 and (higher := words[word] >> bit >> 1):
                first = bit + (higher & -higher).bit_length()
                above = self._descend((word << _BITS) + first, level, last=False)
            if below >= 0 and above >= 0:
                break
            number = word
        return below, above

    def _descend(self, number: int, level: int, *, last: bool) -> int:
        """The last or first member below a bit of a level."""
        for words in reversed(self._levels[:level]):
            word = words[number]
            bit = word.bit_length() if last else (word & -word).bit_length()
            number = (number << _BITS) + bit - 1
        return number
