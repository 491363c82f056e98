"""Matrix products as tensor cores run them: in tiles, and the tiles in waves over the card's SMs.

A product of M by N by K is cut into tiles of the result, one to a thread block. The last wave and
the tiles at the edges are paid for in full (NVIDIA: Matrix Multiplication Background User's Guide,
"Tile Quantization" and "Wave Quantization"). Where there are few tiles, K is split too. Of the
tiles that libraries offer the best one is taken. Of a product of a few columns or a few steps of
K a tile wastes nearly all, and kernels without tensor cores are faster.
"""

from __future__ import annotations

import math
from functools import cache

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 128, 0.85),
          (256, 64, 0.9), (64, 256, 0.9), (64, 64, 0.72), (64, 32, 0.5), (32, 64, 0.5),
          (128, 32, 0.6), (32, 128, 0.6), (256, 32, 0.65))  # fmt: skip
"""Rows, columns, and what a tile of this size reaches of the best one's rate: smaller ones load
more operands for each operation."""
_PROLOGUE = 96
"""Steps of K that filling the pipeline and writing the result take."""
_DEPTH = 32
"""Steps of K that a tile takes at a time."""
_SPLITS = (1, 2, 4, 8, 16, 32, 64)
_LEAST_SPLIT_DEPTH = 256
_NARROW = (64, 4)
"""Rows and columns of a block of a kernel without tensor cores, which takes single steps of K."""
_NARROW_COST = 16
"""Operations of tensor cores in the time of one without them: 312 to 19.5 TFLOPS on an A100."""


@cache
def quantised_flops(rows: int, columns: int, depth: int, batch: int, sms: int) -> float:
    """Operations that a card with `sms` SMs could have done in the time that `batch` products
    `[rows, depth] @ [depth, columns]` take it, if all SMs ran whole tiles at their best rate."""
    height, width = _NARROW
    blocks = -(-rows // height) * -(-columns // width) * batch
    best = _waves(blocks / sms) * sms * height * width * depth * 2 * _NARROW_COST
    for height, width, share in _TILES:
        tiles = -(-rows // height) * -(-columns // width) * batch
        for split in _SPLITS:
            part = -(-depth // split)
            if split > 1 and part < _LEAST_SPLIT_DEPTH:
                break
            waves = _waves(tiles * split / sms)
            steps = -(-part // _DEPTH) * _DEPTH + _PROLOGUE
            best = min(best, waves * sms * height * width * steps * 2 / share)
    return best


def _waves(waves: float) -> float:
    """Blocks of a wave do not end all at once, and an SM runs two side by side: half a wave that
    is not full is lost on average, and never more than the wave itself."""
    whole = math.ceil(waves)
    return whole - (whole - waves) * 0.5 if waves > 1 else whole
