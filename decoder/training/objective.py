"""What a DFlash draft is trained for: random anchors, masked blocks, early rows weigh more.

Recipe of DFlash (arXiv 2602.06036): a block is the anchor and masks; row ``o`` predicts the token
at ``anchor + o`` with weight ``exp(-(o - 1) / gamma)``; the anchor's row predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash_batch.decoder.training.draft import Draft, DraftConfig
from dflash_batch.decoder.training.features import Frozen
from dflash_batch.decoder.training.fit import Batch, FitSettings, Report, compiled, fit

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}

PIECE = 8192
"""Rows whose logits exist at the same time."""


def draw_anchors(
    supervised: NDArray[np.bool_], count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Up to ``count`` anchors per row, without replacement and sorted, and which are real.

    Both are [N, count]. An anchor is supervised and so is the token behind it. Rows with too few
    have unreal ones at position 0.
    """
    possible = supervised[:, :-1] & supervised[:, 1:]
    keys = np.where(possible, rng.random(possible.shape), 2.0)
    chosen = np.argsort(keys, axis=1)[:, :count].astype(np.int32)
    real = np.take_along_axis(possible, chosen, axis=1)
    order = np.argsort(np.where(real, chosen, len(possible[0])), axis=1)
    real = np.take_along_axis(real, order, axis=1)
    return np.where(real, np.take_along_axis(chosen, order, axis=1), 0), real


def block_labels(
    tokens: mx.array, supervised: mx.array, anchors: mx.array, real: mx.array, block: int
) -> tuple[mx.array, mx.array]:
    """Labels int [N, A, V] and which count [N, A, V]; a label behind the end counts for nothing."""
    places = anchors[..., None] + mx.arange(block)
    inside = places < tokens.shape[1]
    places = mx.minimum(places, tokens.shape[1] - 1)
    flat = places.reshape(len(tokens), -1)
    labels = mx.take_along_axis(tokens, flat, axis=1).reshape(places.shape)
    counts = mx.take_along_axis(supervised, flat, axis=1).reshape(places.shape)
    return labels, counts & inside & real[..., None] & (mx.arange(block) > 0)


def row_weights(block: int, gamma: float) -> mx.array:
    """Float [V]: 0 for the anchor, then ``exp(-(o - 1) / gamma)``."""
    offsets = mx.arange(block)
    return mx.where(offsets > 0, mx.exp(-(offsets - 1) / gamma), 0.0)


def draft_hidden(
    draft: Draft,
    target: Frozen,
    config: DraftConfig,
    first: mx.array,
    anchors: mx.array,
    features: mx.array,
) -> mx.array:
    """Hidden states [N, A, V, h] of blocks that begin with the tokens ``first`` [N, A]."""
    masks = mx.full((*first.shape, config.block_size - 1), config.mask_token_id, dtype=mx.int32)
    blocks = mx.concatenate([first[..., None], masks], axis=-1)
    return draft(target.embed(blocks), anchors, features)


def draft_loss(draft: Draft, target: Frozen, config: DraftConfig) -> Callable[..., mx.array]:
    """The loss, a function of one batch.

    A batch is tokens [N, T], supervised [N, T], anchors [N, A], real [N, A], features [N, T, n*h].
    """
    gamma = GAMMA.get(config.block_size, config.block_size / 2)
    weights = row_weights(config.block_size, gamma)

    def loss(
        tokens: mx.array,
        supervised: mx.array,
        anchors: mx.array,
        real: mx.array,
        features: mx.array,
    ) -> mx.array:
        first = mx.take_along_axis(tokens, anchors, axis=1)
        hidden = draft_hidden(draft, target, config, first, anchors, features)
        labels, counts = block_labels(tokens, supervised, anchors, real, config.block_size)
        weight = (counts * weights)[:, :, 1:]
        weight = weight / mx.maximum(weight.sum(), 1e-6)
        rows = hidden[:, :, 1:].reshape(-1, hidden.shape[-1])
        return cross_entropy(target.head, rows, labels[:, :, 1:].flatten(), weight.flatten())

    return loss


def cross_entropy(
    head: Callable[[mx.array], mx.array], hidden: mx.array, labels: mx.array, weights: mx.array
) -> mx.array:
    """Σ weight · CE of the frozen head's logits on hidden [n, h], labels int [n], weights [n].

    In pieces, and the slope on `hidden` is made right behind the logits, since the head is not
    trained: so only one piece's logits exist at a time. With L the loss and L' that slope, the
    value is L + L'·(x - x̄) with x̄ = x held fast, which has the gradient L'.
    """
    total, slopes = mx.array(0.0), list[mx.array]()
    still = mx.stop_gradient(hidden)
    for at in range(0, len(hidden), PIECE):
        part = slice(at, at + PIECE)
        loss, slope = _loss_and_slope(head, still[part], labels[part], weights[part])
        total = total + loss
        slopes.append(slope)
    slope = mx.stop_gradient(mx.concatenate(slopes))
    return mx.stop_gradient(total) + (slope.astype(mx.float32) * (hidden - still)).sum()


def _loss_and_slope(
    head: Callable[[mx.array], mx.array], hidden: mx.array, labels: mx.array, weights: mx.array
) -> tuple[mx.array, mx.array]:
    raw = head(hidden)
    logits = raw.astype(mx.float32)
    whole = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logits, labels[:, None], axis=-1)
    right = mx.arange(logits.shape[-1]) == labels[:, None]
    upward = (mx.exp(logits - whole) - right) * weights[:, None]
    _, (slope,) = mx.vjp(lambda x: [head(x)], [hidden], [upward.astype(raw.dtype)])
    return ((whole - own)[:, 0] * weights).sum(), slope


def train_draft(
    draft: Draft,
    config: DraftConfig,
    target: Frozen,
    rows: Iterable[tuple[NDArray[np.int32], NDArray[np.bool_]]],
    settings: FitSettings,
    *,
    anchors_per_token: float = 0.125,
    seed: int = 0,
    report: Report = print,
    check: Callable[[int], str] | None = None,
) -> list[float]:
    """Train ``draft`` in place on rows (tokens [N, T], supervised [N, T]) of the target's own text.

    Anchors are drawn anew for each batch; features come from one causal target forward.
    """
    batches = _with_features(target, rows, anchors_per_token, np.random.default_rng(seed))
    return fit(draft, draft_loss(draft, target, config), batches, settings, report, check)


def accepted_lengths(
    draft: Draft,
    target: Frozen,
    config: DraftConfig,
    tokens: mx.array,
    supervised: mx.array,
    anchors: mx.array,
) -> mx.array:
    """Int [N, A]: how many drafts behind each anchor agree with the row's own next tokens."""
    features = target.features(tokens)
    first = mx.take_along_axis(tokens, anchors, axis=1)
    hidden = draft_hidden(draft, target, config, first, anchors, features)
    drafts = mx.argmax(target.head(hidden[:, :, 1:]), axis=-1)
    real = mx.ones(anchors.shape, dtype=mx.bool_)
    labels, counts = block_labels(tokens, supervised, anchors, real, config.block_size)
    agree = (drafts == labels[:, :, 1:]) & counts[:, :, 1:]
    return mx.cumprod(agree.astype(mx.int32), axis=-1).sum(axis=-1)


def _with_features(
    target: Frozen,
    rows: Iterable[tuple[NDArray[np.int32], NDArray[np.bool_]]],
    anchors_per_token: float,
    rng: np.random.Generator,
) -> Iterator[Batch]:
    tap = compiled(target.features)
    for tokens, supervised in rows:
        count = max(1, round(anchors_per_token * tokens.shape[1]))
        anchors, real = draw_anchors(supervised, count, rng)
        given = mx.array(tokens)
        yield given, mx.array(supervised), mx.array(anchors), mx.array(real), tap(given)
