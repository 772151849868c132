"""Measures a pair: plain greedy decoding, and tokens per cycle by a plain B = 1 DFlash loop.

Written for clearness, not speed: it is the yardstick for checkpoints, and the engine is elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from dflash_batch.decoder.training.corpus import Rows
from dflash_batch.decoder.training.draft import Draft, DraftConfig
from dflash_batch.decoder.training.features import Frozen, FrozenTarget
from dflash_batch.decoder.training.objective import accepted_lengths


class Run(NamedTuple):
    """Emitted tokens, the stop token included, and the number of draft-and-verify cycles."""

    tokens: list[int]
    cycles: int


def plain_greedy(model: Any, prompt: Sequence[int], stop: int, limit: int) -> list[int]:
    """Greedy decoding, one token per forward."""
    cache = make_prompt_cache(model)
    out: list[int] = []
    given = mx.array([list(prompt)])
    while len(out) < limit and stop not in out[-1:]:
        out += np.array(mx.argmax(model(given, cache=cache)[:, -1], axis=-1)).tolist()
        given = mx.array([out[-1:]])
    return out


def dflash_greedy(
    model: Any, draft: Draft, config: DraftConfig, prompt: Sequence[int], stop: int, limit: int
) -> Run:
    """The DFlash loop (arXiv 2602.06036) for one row: draft a block, verify, keep what agrees."""
    target = FrozenTarget(model, config.target_layer_ids)
    cache = make_prompt_cache(model)
    seen = target.tap(mx.array([list(prompt)]), cache)
    features, out = seen.features, [_greedy(target, seen.hidden)[-1]]
    cycles = 0
    while len(out) < limit and out[-1] != stop:
        size = min(config.block_size, limit - len(out) + 1)
        block = _drafted(draft, target, config, out[-1], features, size)
        seen = target.tap(mx.array([block]), cache)
        best = _greedy(target, seen.hidden)
        agreed = 0
        while agreed < size - 1 and block[agreed + 1] == best[agreed]:
            agreed += 1
        new = best[: min(agreed + 1, limit - len(out))]
        new = new[: new.index(stop) + 1] if stop in new else new
        out += new
        trim_prompt_cache(cache, size - len(new))
        features = mx.concatenate([features, seen.features[:, : len(new)]], axis=1)
        cycles += 1
    return Run(out, cycles)


def _drafted(
    draft: Draft,
    target: FrozenTarget,
    config: DraftConfig,
    anchor: int,
    features: mx.array,
    size: int,
) -> list[int]:
    """The anchor and ``size - 1`` drafts behind a context of ``features`` [1, N, n*h]."""
    block = mx.array([[[anchor] + [config.mask_token_id] * (size - 1)]])
    place = mx.array([[features.shape[1]]])
    hidden = draft(target.embed(block), place, features)
    return [anchor, *_greedy(target, hidden[0, :, 1:])]


def _greedy(target: FrozenTarget, hidden: mx.array) -> list[int]:
    """Argmax tokens of hidden states [1, T, h]."""
    tokens: list[int] = np.array(mx.argmax(target.head(hidden), axis=-1))[0].tolist()
    return tokens


def tokens_per_cycle(
    draft: Draft, target: Frozen, config: DraftConfig, rows: Rows, batch: int = 64
) -> float:
    """Tokens per cycle on rows that hold one own reply each, without decoding.

    The replies are known to be greedy, so each anchor's accepted length can be had in one forward
    of fixed shape, and the cycles are then walked: from an anchor to the one behind what it emits.
    """
    start = rows.supervised.argmax(axis=1)
    length = rows.supervised.sum(axis=1)
    widest = int(length.max())
    emitted = cycles = 0
    for first in range(0, len(rows.tokens), batch):
        part = slice(first, first + batch)
        anchors = np.minimum(
            start[part, None] + np.arange(widest), rows.tokens.shape[1] - 1
        ).astype(np.int32)
        accepted = accepted_lengths(
            draft,
            target,
            config,
            mx.array(rows.tokens[part]),
            mx.array(rows.supervised[part]),
            mx.array(anchors),
        )
        for lengths, total in zip(np.array(accepted), length[part].tolist(), strict=True):
            at = 0
            while at < total - 1:
                at += min(int(lengths[at]) + 1, total - 1 - at)
                cycles += 1
            emitted += total - 1
    return emitted / max(cycles, 1)
