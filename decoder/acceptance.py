"""Which drafts stand: the greedy rule, on the device, for all rows at once."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Accepted(NamedTuple):
    """Per row, int32 [R]."""

    keep: mx.array  # tokens emitted, which is also tokens committed (the anchor + keep-1 drafts)
    drafts: mx.array  # drafts that agreed with the target


def accept_greedy(
    drafts: mx.array, chosen: mx.array, width: mx.array, remaining: mx.array
) -> Accepted:
    """The longest prefix of `drafts` the target agrees with, plus the target's next token.

    drafts int32 [R, k], chosen int32 [R, k+1]: the target's argmax after the anchor and after
    each draft. width int32 [R]: the row's own block length; remaining int32 [R]: tokens it may
    still emit, 0 for an idle row, which then keeps nothing.

        block       anchor  x1  x2  x3        accepted a = 2
        chosen        p0    p1  p2  p3        x1 = p0, x2 = p1, x3 ≠ p2
        emitted       p0    p1  p2            a + 1 tokens: accepted drafts equal what was chosen
    """
    k = drafts.shape[1]
    inside = mx.arange(k, dtype=mx.int32)[None] < (width - 1)[:, None]
    agree = ((drafts == chosen[:, :k]) & inside).astype(mx.int32)
    accepted = mx.cumprod(agree, axis=1).sum(axis=1).astype(mx.int32)
    return Accepted(mx.minimum(accepted + 1, remaining), accepted)
