"""How sources of drafts have fared: marks out of what the text turned out to be.

Every source is marked in every cycle, whether its drafts were the ones verified or not: its drafts
are held against the text, as far as that went. So the one that is not in use is not forgotten, and
nothing has to be tried out. Counted are drafts that would have stood and drafts that would have
been tried, by source and `band` (how well a lookup matched), of each row and of all together; old
ones fade.
"""

from __future__ import annotations

import mlx.core as mx

LEAN = 4.0
"""Drafts that the opinion we start with counts for."""

ROW_LEAN = 12.0
"""Drafts that all rows together count for in a row's own marks."""

FADE, ROW_FADE = 0.98, 0.9
"""Of the counts, a cycle."""


class Marks:
    """Counts of `rows` rows, float32 [R, S, B]. They are rebound, never mutated."""

    def __init__(self, rows: int, sources: int, bands: int) -> None:
        self.kept = mx.zeros((rows, sources, bands))
        self.tried = mx.zeros((rows, sources, bands))

    def add(self, kept: mx.array, tried: mx.array, fade: float) -> None:
        """Counts [R, S, B] of a cycle."""
        self.kept = self.kept * fade + kept
        self.tried = self.tried * fade + tried

    def rate(self, prior: mx.array, lean: float) -> mx.array:
        """Share of drafts that stand, given that those before do; what is unknown is `prior`."""
        return (self.kept + lean * prior) / (self.tried + lean)

    def clear(self, row: int) -> None:
        """Another text begins in row `row`."""
        others = (mx.arange(self.kept.shape[0]) != row)[:, None, None]
        self.kept, self.tried = self.kept * others, self.tried * others

    def select(self, rows: mx.array) -> None:
        """Keep the rows named by `rows`, in that order."""
        self.kept, self.tried = self.kept[rows], self.tried[rows]


def marked(
    drafts: mx.array, count: mx.array, truth: mx.array, keep: mx.array
) -> tuple[mx.array, mx.array]:
    """Drafts that would have stood and that would have been tried, int32 [R, S] each.

    drafts int32 [R, S, k], of which count[r, s] are meant; truth int32 [R, k] is the text in their
    place, known for keep[r] tokens. The first draft refused was tried, those behind it were not.
    """
    known = mx.minimum(count, keep[:, None])
    place = mx.arange(drafts.shape[-1], dtype=mx.int32)
    right = (drafts == truth[:, None]) & (place < known[..., None])
    kept = mx.cumprod(right.astype(mx.int32), axis=-1).sum(axis=-1)
    return kept, mx.minimum(kept + 1, mx.maximum(known, 0))


def promise(rate: mx.array, count: mx.array, most: int) -> mx.array:
    """Drafts that are expected to stand, Σ_{i=1…count} rateⁱ, for rate and count [R, S]."""
    place = mx.arange(1, most + 1, dtype=mx.int32)
    powers = rate[..., None] ** place
    return mx.where(place <= count[..., None], powers, 0.0).sum(axis=-1)
