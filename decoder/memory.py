"""What rows take in memory, and how many there is room for.

A row takes its columns of the arena whether it has filled them or not, all rows as many as the
longest will need, so what counts is width × columns. Counted are the longest texts that rows may
write: what was admitted can be finished.
"""

from __future__ import annotations

import mlx.core as mx

from dflash_batch.decoder.cycle import Slots
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.targets.base import Target

SHARE = 0.8
"""Of a GPU's memory, if no limit is given: the system and other programs need some too."""

SLACK = 1.15
"""Room for what is copied while an arena grows, a layer at a time, and for a chunk of prompts."""


class Budget:
    """How many rows fit beside the weights. Without a limit, any number."""

    def __init__(self, target: Target, drafter: Drafter, limit: int | None) -> None:
        """`limit` is bytes for all this process keeps on the device, weights included."""
        self.step = Slots(1, target, drafter).lens.step
        self.limit = limit
        self._room = None if limit is None else limit - mx.get_active_memory()
        self._target = target
        self._drafter = drafter
        self._block = drafter.spec.max_k + 1
        self._at: dict[int, int] = {}  # bytes of a row by its columns

    def columns(self, tokens: int) -> int:
        """Columns for a row of so many tokens, a block beyond them included."""
        return -(-(tokens + self._block) // self.step) * self.step

    def rows(self, columns: int) -> int | None:
        """Most rows of so many columns; None: there is no limit."""
        if self._room is None:
            return None
        return max(int(self._room / SLACK) // self.row_bytes(columns), 0)

    def row_bytes(self, columns: int) -> int:
        """What one row takes: its columns, its states, and its part of a cycle's logits."""
        if columns not in self._at:
            slots = Slots(1, self._target, self._drafter)
            slots.lens.open(1)
            # Only shapes are wanted: this graph is never run.
            self._target.forward(mx.zeros((1, 1), dtype=mx.int32), slots.arena, ())
            scores = self._block * self._target.vocab_size * 2 * self._target.dtype.size
            draft = columns * self._drafter.spec.bytes_per_token
            self._at[columns] = slots.arena.row_bytes(columns) + draft + scores
        return self._at[columns]


def limit_here(share: float = SHARE) -> int | None:
    """Bytes a GPU lets one process use, times `share`; None on the CPU, or if it does not say."""
    if mx.default_device() != mx.gpu:
        return None
    info = mx.device_info(mx.gpu)
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(key):
            return int(int(info[key]) * share)
    return None
