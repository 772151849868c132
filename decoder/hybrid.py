"""The memory of a hybrid target: attention layers in an arena, recurrent ones with a state a row.

The state after n tokens says nothing of the state after fewer, so a snapshot serves exactly the
prefix it was taken at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from dflash_batch.decoder.arena import Arena, Lens, Snapshot
from dflash_batch.decoder.gdn import DeltaLayer


class HybridSnapshot(NamedTuple):
    """One row after its first `length` tokens. Immutable."""

    attention: Snapshot
    recurrent: tuple[tuple[mx.array, mx.array], ...]  # window and state of each layer

    @property
    def length(self) -> int:
        return self.attention.length

    @property
    def cuttable(self) -> bool:
        return False

    def first(self, length: int) -> HybridSnapshot:
        """Itself: there is no shorter one in it."""
        assert length == self.length, "a recurrent state cannot be cut"
        return self

    def arrays(self) -> list[mx.array]:
        return [*self.attention.arrays(), *(a for pair in self.recurrent for a in pair)]


class HybridArena:
    """The layers of one model on one `Lens`, each kind in its own order."""

    def __init__(self, attention: int, recurrent: Sequence[DeltaLayer], lens: Lens) -> None:
        self.lens = lens
        self.attention = Arena(attention, lens)
        self.recurrent = recurrent

    def commit(self, keep: mx.array) -> None:
        """Take the recurrent states past the tokens kept; columns need nothing."""
        for layer in self.recurrent:
            layer.commit(keep)

    def snapshot(self, row: int, length: int) -> HybridSnapshot:
        """Copy out a row, of which `length` tokens are committed, no more and no less."""
        states = (layer.read(row) for layer in self.recurrent)
        return HybridSnapshot(
            self.attention.snapshot(row, length),
            tuple((mx.contiguous(window), mx.contiguous(state)) for window, state in states),
        )

    def load(self, row: int, snapshot: HybridSnapshot) -> None:
        """Put a snapshot into a row. The row's length is `Lens.place`'s business."""
        self.attention.load(row, snapshot.attention)
        for layer, (window, state) in zip(self.recurrent, snapshot.recurrent, strict=True):
            layer.load(row, window, state)

    def select(self, rows: mx.array) -> None:
        self.attention.select(rows)
        for layer in self.recurrent:
            layer.select(rows)

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row: its columns, its states, and the tape of a block."""
        states = sum(
            (layer.window.nbytes + layer.state.nbytes) // self.lens.rows for layer in self.recurrent
        )
        return self.attention.row_bytes(columns) + 2 * states

    def arrays(self) -> list[mx.array]:
        """Every buffer, for evaluation."""
        states = [a for layer in self.recurrent for a in (layer.window, layer.state)]
        return [*self.attention.arrays(), *states]
