"""What each row has said so far, prompt included: token ids on the device.

    column      0 … N-1          N               N+1 …
    holds       committed text   (the anchor)    what was rejected, or nothing yet

Like the keys and values of an arena: left-aligned on the rows' `Lens`; a cycle writes all its
tokens, and what is rejected is covered by the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from dflash_batch.decoder.arena import Lens

NOTHING = -1
"""In a text: no token. Equal to no token id."""

TOGETHER = 16
"""Writes that may wait for one another: beyond, the graph would grow while nobody reads."""


class Said(NamedTuple):
    """The first `length` tokens of one row. Immutable."""

    length: int
    tokens: mx.array  # int32 [length]

    def first(self, length: int) -> Said:
        """The text of a shorter prefix."""
        return Said(length, self.tokens[:length])


class History:
    """The committed tokens of many rows."""

    def __init__(self, lens: Lens) -> None:
        self.lens = lens
        self._tokens = mx.full((lens.rows, lens.step), NOTHING, dtype=mx.int32)
        self._waiting = 0

    def write(self, tokens: mx.array) -> None:
        """Tokens int32 [R, T] into the columns that `Lens.open(T)` names."""
        self._make_room(self.lens.columns)
        self._tokens = mx.put_along_axis(self._tokens, self.lens.index, tokens, axis=1)
        self._waiting += 1
        if self._waiting == TOGETHER:
            mx.async_eval(self._tokens)
            self._waiting = 0

    def text(self, anchor: mx.array) -> mx.array:
        """int32 [R, S] of the drawing, S the columns seen, with `anchor` (int32 [R]) at N."""
        self._make_room(self.lens.columns)
        column = mx.arange(self.lens.columns, dtype=mx.int32)
        end = self.lens.offset[:, None]
        behind = mx.where(column == end, anchor[:, None], NOTHING)
        return mx.where(column < end, self._tokens[:, : self.lens.columns], behind)

    def snapshot(self, row: int, length: int) -> Said:
        """Copy out the first `length` tokens of a row."""
        return Said(length, mx.contiguous(self._tokens[row, :length]))

    def load(self, row: int, said: Said) -> None:
        """Put a text at the left of row `row`."""
        self._make_room(-(-said.length // self.lens.step) * self.lens.step)
        start = mx.array([row, 0], dtype=mx.int32)
        self._tokens = mx.slice_update(self._tokens, said.tokens[None], start, axes=[0, 1])

    def select(self, rows: mx.array) -> None:
        """Keep the rows named by `rows` (int32 [R']), in that order."""
        self._tokens = self._tokens[rows]

    def _make_room(self, columns: int) -> None:
        rows, have = self._tokens.shape
        if have < columns:
            more = mx.full((rows, columns - have), NOTHING, dtype=mx.int32)
            self._tokens = mx.concatenate([self._tokens, more], axis=1)
