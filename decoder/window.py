"""The memory of a target with sliding layers: of those, only what the window can still reach.

A sliding layer keeps the columns of each row from its own `base` on, in order. When the rows have
moved on far enough, all columns are shifted to the left and the bases move along:

    position    0 1 2 3 4 5 6 7 8 9 …          window 4, row at offset 9
    before      k k k k k k k k k x x          base 0; x: written, not (yet) committed
    after               k k k k k x x          base 4: the next token, at 9, sees 6 … 9

A base is a multiple of the column step, and no column moves against its neighbours, so sums are
formed in the same order as without a window: the same bits on the CPU backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.arena import LayerKV, Lens


class Window:
    """Which columns sliding layers write and see: what a `Lens` is to full ones."""

    def __init__(self, lens: Lens, size: int) -> None:
        self.lens = lens
        self.size = size
        self.base = mx.zeros((lens.rows,), dtype=mx.int32)  # position of a row's first column
        self.columns = 0
        self.index = mx.zeros((lens.rows, 0), dtype=mx.int32)
        self._used = 0  # the host's upper bound of any offset - base

    @property
    def rows(self) -> int:
        return self.lens.rows

    @property
    def step(self) -> int:
        return self.lens.step

    @property
    def offset(self) -> mx.array:
        return self.lens.offset

    def open(self) -> mx.array | None:
        """Follow `Lens.open`. Returns how far to shift each row's columns, int32 [R], if at all."""
        width = self.lens.index.shape[1]
        self._used = min(self._used, self.lens.bound)
        base = mx.minimum(self.base, self.offset)  # a row that was emptied starts anew
        shift = None
        if self._used >= self.size + 2 * self.step:
            first = mx.maximum(self.offset - self.size, 0) // self.step * self.step
            base, shift = first, first - base
            self._used = self.size + self.step
        self.base = base
        self.columns = -(-(self._used + width) // self.step) * self.step
        self.index = self.lens.index - base[:, None]
        self._used += width
        return shift

    def causal(self) -> mx.array:
        """Bool mask [R, 1, T, S]: a token sees itself, and what came before within the window."""
        column = mx.arange(self.columns, dtype=mx.int32)
        own = self.index[:, None, :, None]
        return (column <= own) & (column > own - self.size)

    def reach(self, row: int, length: int) -> tuple[int, int]:
        """The base of a row of `length` tokens, and the least it could have by now."""
        return int(np.array(self.base)[row]), max(length - self.size, 0) // self.step * self.step

    def place(self, row: int, base: int, length: int) -> None:
        """Say where the columns loaded into a row begin."""
        here = mx.arange(self.rows, dtype=mx.int32) == row
        self.base = mx.where(here, mx.array(base, dtype=mx.int32), self.base)
        self._used = max(self._used, length - base)

    def select(self, rows: mx.array) -> None:
        self.base = self.base[rows]


class WindowSnapshot(NamedTuple):
    """One row after its first `length` tokens; of sliding layers only the last of them."""

    length: int
    base: int  # position of the first column of sliding layers
    layers: tuple[tuple[mx.array, mx.array], ...]  # keys, values [1, heads, n, D]

    @property
    def cuttable(self) -> bool:
        return False

    def first(self, length: int) -> WindowSnapshot:
        """Itself: what a shorter one would see may be gone."""
        assert length == self.length, "a window cannot be moved back"
        return self

    def arrays(self) -> list[mx.array]:
        return [a for pair in self.layers for a in pair]


class WindowArena:
    """The layers of one model, each full (on the `Lens`) or sliding (on the `Window`)."""

    def __init__(self, sliding: Sequence[bool], size: int, lens: Lens) -> None:
        self.lens = lens
        self.window = Window(lens, size)
        self.layers = [LayerKV(self.window if slides else lens) for slides in sliding]
        self._sliding = list(sliding)

    def open(self) -> None:
        """Follow `Lens.open`: make room in the sliding layers."""
        shift = self.window.open()
        if shift is not None:
            for layer, slides in zip(self.layers, self._sliding, strict=True):
                if slides:
                    layer.shift(shift)

    def commit(self, keep: mx.array) -> None:
        """Nothing to do: what was kept is in its columns, and `Lens.advance` shows them."""

    def snapshot(self, row: int, length: int) -> WindowSnapshot:
        """Copy out a row, of which `length` tokens are committed, no more and no less."""
        base, first = self.window.reach(row, length)
        pairs = (
            layer.read(row, length - base, first - base) if slides else layer.read(row, length)
            for layer, slides in zip(self.layers, self._sliding, strict=True)
        )
        copies = tuple((mx.contiguous(k), mx.contiguous(v)) for k, v in pairs)
        return WindowSnapshot(length, first, copies)

    def load(self, row: int, snapshot: WindowSnapshot) -> None:
        """Put a snapshot into a row. The row's length is `Lens.place`'s business."""
        for layer, (keys, values) in zip(self.layers, snapshot.layers, strict=True):
            layer.load(row, keys, values)
        self.window.place(row, snapshot.base, snapshot.length)

    def select(self, rows: mx.array) -> None:
        self.window.select(rows)
        for layer in self.layers:
            layer.select(rows)

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row: sliding layers keep no more than the window and what it moves by."""
        near = min(columns, self.window.size + 3 * self.lens.step)
        return sum(
            (near if slides else columns) * layer.column_bytes()
            for layer, slides in zip(self.layers, self._sliding, strict=True)
        )

    def arrays(self) -> list[mx.array]:
        """Every buffer, for evaluation."""
        return [a for layer in self.layers for a in (layer.keys, layer.values) if a is not None]
