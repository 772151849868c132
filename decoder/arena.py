"""The KV arena: keys and values of many rows side by side, each row with its own length.

Left-aligned, one committed length per row, fixed-shape steps:

    column      0 1 2 3 4 5 6 7 8 9 …                 capacity, a multiple of STEP
    row 0       k k k k k . . .                       offset 5
    row 1       k k k k k k k k x x                   offset 8; x: written, not (yet) committed
    row 2       .                                     idle, offset 0

A forward of T tokens writes columns offset … offset+T-1 of every row and commits none of them;
`Lens.advance` commits. Rolling back a rejected tail is therefore nothing at all: the next write
covers it, and until then the mask hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

GPU_STEP = 256
"""Column step on a GPU: attention is planned anew for each shape, so shapes must be few."""
CPU_STEP = 64
"""Column step on the CPU backend, where every masked column is paid for."""


def column_step() -> int:
    """The column step of the default device."""
    return GPU_STEP if mx.default_device() == mx.gpu else CPU_STEP


class Lens:
    """The committed length of each row, shared by all layers of a target and its draft.

    `offset` is int32 [R] on the device and is rebound, never mutated: others may hold it.
    `bound` is the host's upper bound of any length; it only sets capacity and mask width, so the
    host need not wait for the device to know the lengths.
    """

    def __init__(self, rows: int, *, step: int | None = None) -> None:
        self.rows = rows
        self.step = step or column_step()
        self.offset = mx.zeros((rows,), dtype=mx.int32)
        self.bound = 0
        self.columns = 0
        self.index = mx.zeros((rows, 0), dtype=mx.int32)
        self.keep: mx.array | None = None

    def open(self, width: int, keep: mx.array | None = None) -> None:
        """Fix the shapes of one forward of `width` tokens per row.

        Sets `columns`, the visible columns S, and `index`, the int32 [R, T] columns to write.
        `keep` (int32 [R]) says how many tokens of each row will be committed, if that is known
        beforehand, as it is of a prompt or without drafts: a recurrent layer then need not run
        them twice.
        """
        self.keep = keep
        self.columns = -(-(self.bound + width) // self.step) * self.step
        self.index = self.offset[:, None] + mx.arange(width, dtype=mx.int32)[None]

    def causal(self, window: int | None = None) -> mx.array:
        """Bool mask [R, 1, T, S]: a token sees itself, and what came before within `window`."""
        column = mx.arange(self.columns, dtype=mx.int32)
        own = self.index[:, None, :, None]
        mask = column <= own
        if window is not None:
            mask = mask & (column > own - window)
        return mask

    def advance(self, keep: mx.array) -> None:
        """Commit the first `keep` (int32 [R]) of the tokens written last in each row."""
        self.offset = self.offset + keep

    def place(self, row: int, length: int) -> None:
        """Set the length of one row: one was loaded into it, or it was emptied."""
        here = mx.arange(self.rows, dtype=mx.int32) == row
        self.offset = mx.where(here, mx.array(length, dtype=mx.int32), self.offset)

    def select(self, rows: mx.array) -> None:
        """Keep the rows named by `rows` (int32 [R']), in that order."""
        self.rows = rows.shape[0]
        self.offset = self.offset[rows]


class Columns(Protocol):
    """Which columns of a layer's buffer a forward writes and sees: a `Lens`, or part of one."""

    @property
    def rows(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def offset(self) -> mx.array: ...
    @property
    def columns(self) -> int: ...
    @property
    def index(self) -> mx.array: ...


class LayerKV:
    """Keys and values of one layer, [R, heads, columns, head_dim].

    It has the three members which stock mlx-lm attention modules ask of a cache (`offset`,
    `update_and_fetch`, `make_mask` is not needed: masks come from `Lens`), so they run unmodified.
    """

    def __init__(self, lens: Columns) -> None:
        self.lens = lens
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """int32 [R]: the rope position of the first token of this forward in each row."""
        return self.lens.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [R, heads, T, D] at each row's own columns; return the visible columns."""
        self.keys = self._written(self._room(self.keys, keys), keys)
        self.values = self._written(self._room(self.values, values), values)
        return self.keys[:, :, : self.lens.columns], self.values[:, :, : self.lens.columns]

    def _written(self, buffer: mx.array, new: mx.array) -> mx.array:
        # put_along_axis lets MLX write in place when nobody else holds the buffer.
        index = mx.broadcast_to(self.lens.index[:, None, :, None], new.shape)
        return mx.put_along_axis(buffer, index, new.astype(buffer.dtype), axis=2)

    def _room(self, buffer: mx.array | None, like: mx.array) -> mx.array:
        """`buffer` with at least `lens.columns` columns."""
        rows, heads, _, dim = like.shape
        have = 0 if buffer is None else buffer.shape[2]
        missing = self.lens.columns - have
        if buffer is not None and missing <= 0:
            return buffer
        more = mx.zeros((rows, heads, missing, dim), dtype=like.dtype)
        return more if buffer is None else mx.concatenate([buffer, more], axis=2)

    def read(self, row: int, stop: int, start: int = 0) -> tuple[mx.array, mx.array]:
        """A copy-on-write view of one row's columns start … stop-1, [1, heads, n, D]."""
        assert self.keys is not None
        assert self.values is not None
        return (
            self.keys[row : row + 1, :, start:stop],
            self.values[row : row + 1, :, start:stop],
        )

    def load(self, row: int, keys: mx.array, values: mx.array) -> None:
        """Put one row's columns, [1, heads, n, D], at the left of row `row`."""
        self.keys = self._loaded(self.keys, row, keys)
        self.values = self._loaded(self.values, row, values)

    def _loaded(self, buffer: mx.array | None, row: int, new: mx.array) -> mx.array:
        _, heads, length, dim = new.shape
        columns = -(-length // self.lens.step) * self.lens.step
        if buffer is None:
            buffer = mx.zeros((self.lens.rows, heads, columns, dim), dtype=new.dtype)
        elif buffer.shape[2] < columns:
            more = mx.zeros((buffer.shape[0], heads, columns - buffer.shape[2], dim), buffer.dtype)
            buffer = mx.concatenate([buffer, more], axis=2)
        start = mx.array([row, 0], dtype=mx.int32)
        return mx.slice_update(buffer, new.astype(buffer.dtype), start, axes=[0, 2])

    def shift(self, by: mx.array) -> None:
        """Move each row's columns by[r] (int32 [R]) to the left, dropping the first. One copy."""
        if self.keys is not None and self.values is not None:
            last = self.keys.shape[2] - 1
            source = mx.minimum(mx.arange(last + 1, dtype=mx.int32) + by[:, None], last)
            source = source[:, None, :, None]
            self.keys = mx.take_along_axis(self.keys, source, axis=2)
            self.values = mx.take_along_axis(self.values, source, axis=2)

    def column_bytes(self) -> int:
        """Bytes of one column of one row."""
        held = [a for a in (self.keys, self.values) if a is not None]
        return sum(a.nbytes // (a.shape[0] * a.shape[2]) for a in held)

    def select(self, rows: mx.array) -> None:
        """Keep the rows named by `rows`, in that order. One copy."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class RowSnapshot(Protocol):
    """What a target remembers of one row after its first `length` tokens. Immutable."""

    @property
    def length(self) -> int: ...

    @property
    def cuttable(self) -> bool:
        """Whether `first` can give a shorter one."""
        ...

    def first(self, length: int) -> RowSnapshot:
        """The snapshot of a prefix of the prefix."""
        ...

    def arrays(self) -> Sequence[mx.array]:
        """Everything in it, for evaluation."""
        ...


class RowState(Protocol):
    """What a target remembers of many rows, on their `Lens`."""

    lens: Lens

    def commit(self, keep: mx.array) -> None:
        """Take in the first `keep` (int32 [R]) tokens of the last forward in each row.

        Called before `Lens.advance(keep)`. keep[r] = 0 leaves row r as it was.
        """
        ...

    def snapshot(self, row: int, length: int) -> RowSnapshot:
        """Copy out a row after `length` tokens, which must be what is committed."""
        ...

    def load(self, row: int, snapshot: Any) -> None:
        """Put a snapshot of the same target into a row; `Lens.place` gives it its length."""
        ...

    def select(self, rows: mx.array) -> None:
        """Keep the rows named by `rows` (int32 [R']), in that order."""
        ...

    def row_bytes(self, columns: int) -> int:
        """What a row with so many columns takes. Known once a forward has been built."""
        ...

    def arrays(self) -> Sequence[mx.array]:
        """Every buffer, for evaluation."""
        ...


class Snapshot(NamedTuple):
    """The first `length` columns of one row, of every layer. Immutable."""

    length: int
    layers: tuple[tuple[mx.array, mx.array], ...]  # keys, values [1, heads, length, D]

    @property
    def cuttable(self) -> bool:
        return True

    def first(self, length: int) -> Snapshot:
        """The snapshot of a shorter prefix."""
        assert length <= self.length
        if length == self.length:
            return self
        return Snapshot(length, tuple((k[:, :, :length], v[:, :, :length]) for k, v in self.layers))

    def arrays(self) -> list[mx.array]:
        return [a for pair in self.layers for a in pair]


class Arena:
    """The attention layers of one model on one `Lens`."""

    def __init__(self, layers: int, lens: Lens) -> None:
        self.lens = lens
        self.layers = [LayerKV(lens) for _ in range(layers)]

    def commit(self, keep: mx.array) -> None:
        """Nothing to do: what was kept is in its columns, and `Lens.advance` shows them."""

    def snapshot(self, row: int, length: int) -> Snapshot:
        """Copy out the first `length` columns of a row."""
        # Contiguous copies: a view would keep the whole arena from being written in place.
        pairs = (layer.read(row, length) for layer in self.layers)
        return Snapshot(length, tuple((mx.contiguous(k), mx.contiguous(v)) for k, v in pairs))

    def load(self, row: int, snapshot: Snapshot) -> None:
        """Put a snapshot into a row. The row's length is `Lens.place`'s business."""
        for layer, (keys, values) in zip(self.layers, snapshot.layers, strict=True):
            layer.load(row, keys, values)

    def select(self, rows: mx.array) -> None:
        for layer in self.layers:
            layer.select(rows)

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row's columns."""
        return columns * sum(layer.column_bytes() for layer in self.layers)

    def arrays(self) -> Sequence[mx.array]:
        """Every buffer, for evaluation."""
        return [a for layer in self.layers for a in (layer.keys, layer.values) if a is not None]
