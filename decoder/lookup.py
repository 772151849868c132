"""Prompt lookup: what followed the last time that a row's newest tokens were said.

The longest earlier match of a text's end, the latest of several, is found on the device, all rows
at once: every window of a text is compared with the end, and no row's length need be known.

    text     … a b c D E F …        … a b c
                   ^ at                   ^ end      3 tokens match, D E F is the guess

(Saxena, prompt-lookup-decoding, 2023; the search as equality of shifted arrays is ours.)
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from dflash_batch.decoder.history import NOTHING

LONGEST = 8
"""Tokens compared. A longer match says no more."""

_OUTSIDE = -2  # in a key: before the text's first token. Equal to no token and not to NOTHING


class Guess(NamedTuple):
    """What a source would draft, and what it rests on."""

    tokens: mx.array  # int32 [R, k], token ids everywhere
    meant: mx.array  # int32 [R]: how many of them count
    length: mx.array  # int32 [R]: tokens that matched, 0 … LONGEST


def key_of(text: mx.array, end: mx.array) -> mx.array:
    """The LONGEST tokens of each row up to column end[r], that one included: int32 [R, LONGEST]."""
    column = end[:, None] + mx.arange(1 - LONGEST, 1, dtype=mx.int32)
    found = mx.take_along_axis(text, mx.maximum(column, 0), axis=1)
    return mx.where(column >= 0, found, _OUTSIDE)


def matches(text: mx.array, key: mx.array) -> mx.array:
    """How many of a key's tokens, counted from its end, stand up to each column: int32 [R, S].

    `text` int32 [R, S] or [1, S], `key` int32 [R, LONGEST].
    """
    rows, columns = text.shape
    before = mx.full((rows, LONGEST - 1), NOTHING, dtype=mx.int32)
    padded = mx.contiguous(mx.concatenate([before, text], axis=1))
    windows = mx.as_strided(padded, (rows, columns, LONGEST), (columns + LONGEST - 1, 1, 1))
    # A difference at place p of a window leaves the LONGEST-1-p tokens right of it.
    left = mx.arange(LONGEST - 1, -1, -1, dtype=mx.int32)
    return mx.where(windows == key[:, None], LONGEST, left).min(axis=-1)


def in_row(text: mx.array, end: mx.array, key: mx.array, k: int) -> Guess:
    """k tokens by a row's own text int32 [R, S] up to column `end`.

    Where the guess runs into the end, it goes on from its own beginning: text with a period.
    """
    column = mx.arange(text.shape[1], dtype=mx.int32)
    length = mx.where(column < end[:, None], matches(text, key), 0)
    at, found = _best(length)
    period = mx.maximum(end - at, 1)[:, None]
    source = at[:, None] + 1 + mx.arange(k, dtype=mx.int32) % period
    source = mx.minimum(source, end[:, None])
    tokens = mx.maximum(mx.take_along_axis(text, source, axis=1), 0)
    return Guess(tokens, mx.where(found > 0, k, 0), found)


def in_texts(texts: mx.array, key: mx.array, k: int) -> Guess:
    """k tokens by texts of others, int32 [S], each ended by NOTHING; fewer where one ends."""
    columns = texts.shape[0]
    at, found = _best(matches(texts[None], key))
    source = at[:, None] + 1 + mx.arange(k, dtype=mx.int32)
    tokens = texts[mx.minimum(source, columns - 1)]
    there = mx.cumprod(((tokens != NOTHING) & (source < columns)).astype(mx.int32), axis=1)
    count = mx.where(found > 0, there.sum(axis=1), 0).astype(mx.int32)
    return Guess(mx.maximum(tokens, 0), count, found)


def _best(length: mx.array) -> tuple[mx.array, mx.array]:
    """Column and length of the longest match, the latest of several, int32 [R] each."""
    columns = length.shape[1]
    score = length * columns + mx.arange(columns, dtype=mx.int32)
    at = mx.argmax(score, axis=1).astype(mx.int32)
    return at, mx.take_along_axis(length, at[:, None], axis=1)[:, 0]
