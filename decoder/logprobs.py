"""Log probabilities of emitted tokens: log softmax of the target's own logits.

Raw: before bias, penalties, temperature and filters, so they say what the model thinks of a token,
not how likely it was to be drawn. Computed only while some row asks.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

MOST = 20
"""Alternatives looked up for each token. One number for all, so that ties at the end of a row's
list do not depend on what its neighbours ask for."""


class Shown(NamedTuple):
    """Of each position; on the device until somebody reads it."""

    chosen: mx.array  # float32 [R, T]: log p of the token chosen
    ids: mx.array  # int32 [R, T, n]: the most likely tokens, falling; equals by id
    values: mx.array  # float32 [R, T, n]: log p of these


def show(logits: mx.array, chosen: mx.array) -> Shown:
    """For logits [R, T, V] and the tokens chosen int32 [R, T]."""
    z = logits.astype(mx.float32)
    total = mx.logsumexp(z, axis=-1, keepdims=True)
    most = min(MOST, z.shape[-1])
    ids = mx.sort(mx.argpartition(-z, most - 1, axis=-1)[..., :most].astype(mx.int32), axis=-1)
    values = mx.take_along_axis(z, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids, values = (mx.take_along_axis(a, order, axis=-1) for a in (ids, values))
    own = mx.take_along_axis(z, chosen[..., None], axis=-1)
    return Shown((own - total)[..., 0], ids, values - total)
