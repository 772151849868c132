"""How rows choose their tokens: logits to scores, and the random numbers to draw with.

Every row of a batch has its own settings. Scores come from logits in this order, each step only
where some row asks for it:

    bias          z + logit_bias                                          [1]
    repetition    z / r if z > 0 else z · r, for tokens of prompt or output   [2]
    frequency     z - f · (times in the output)                           [1]
    presence      z - s · (1 if in the output)                            [1]
    late          -inf for tokens that end a text, as long as it must not end
    temperature   z / T
    min_p         keep p ≥ min_p · max p                                  [3]
    top_k         keep the k largest
    top_p         keep tokens that have less than top_p of the kept mass before them    [4]

[1] OpenAI API reference, chat completions. [2] arXiv 1909.05858 (CTRL), §4.1. [3] arXiv 2407.01082.
[4] arXiv 1904.09751. The order, bias and penalties before the temperature and filters after it, is
that of the vLLM V1 sampler; top_k before top_p, the mass renormalised, is that of DFlash.
Inside a block, a penalty counts the drafts before its position as text: they stand if it is used.

Random numbers depend on the row's seed, its choice, the token's position in its text and their
purpose alone, so a row draws the same ones in any company. They are Threefry bits (Salmon et al.,
SC 2011), counted up over the vocabulary, under a key made of the four.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.types import Sampling

GREEDY = Sampling()


class Purpose(IntEnum):
    """What a random number is for. Below 4, so that a position and a purpose make one number."""

    CHOICE = 0  # which token it is in the end
    DRAFT = 1  # which token to draft, where that must be independent of the choice
    ACCEPT = 2  # whether the draft stands


class _Columns(NamedTuple):
    """Settings on the device, [R, 1, 1] but for the last two."""

    random: mx.array  # bool
    temperature: mx.array
    repetition: mx.array
    frequency: mx.array
    presence: mx.array
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array
    keys: mx.array  # uint32 [R, 2]
    bias: mx.array | None  # [R, 1, V]
    late: mx.array | None  # bool [R, 1, V]: not to be chosen at positions below
    late_from: mx.array  # int32 [R, 1, 1]


class Sampler:
    """The settings of the rows of some slots, and what their texts hold so far."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.settings = [GREEDY] * rows
        self._vocab = vocab
        # Only while some row has penalties; of the other rows they need not be right.
        self._prompted: mx.array | None = None  # bool [R, V]: in the prompt
        self._counts: mx.array | None = None  # int32 [R, V]: times in the output, anchor included
        self._columns: _Columns | None = None

    # Rows

    def place(
        self, row: int, settings: Sampling, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """A row with these settings and this text becomes live in slot `row`."""
        self.settings[row] = settings
        self._changed()
        if settings.penalised:
            here = (mx.arange(len(self.settings)) == row)[:, None]
            prompted = np.zeros(self._vocab, dtype=np.bool_)
            prompted[np.array(prompt, dtype=np.int64)] = True
            counts = np.bincount(np.array(output, dtype=np.int64), minlength=self._vocab)
            old_prompted, old_counts = self._text()
            self._prompted = mx.where(here, mx.array(prompted), old_prompted)
            self._counts = mx.where(here, mx.array(counts.astype(np.int32)), old_counts)

    def clear(self, row: int) -> None:
        """Slot `row` is idle."""
        self.settings[row] = GREEDY
        self._changed()

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows named by `rows`, in that order."""
        self.settings = [self.settings[row] for row in rows]
        self._changed()
        if self._counts is not None and self._prompted is not None:
            index = mx.array(list(rows), dtype=mx.int32)
            self._counts, self._prompted = self._counts[index], self._prompted[index]

    def take(self, tokens: mx.array, keep: mx.array) -> None:
        """The first `keep` (int32 [R]) of `tokens` (int32 [R, T]) are now text."""
        if self._counts is not None:
            ends = mx.arange(tokens.shape[1], dtype=mx.int32)[None] < keep[:, None]
            self._counts = self._counts + _times(tokens, self._vocab, ends).sum(axis=1)

    @property
    def plain(self) -> bool:
        """Whether every row takes the target's most likely token."""
        return all(settings.plain for settings in self.settings)

    def _text(self) -> tuple[mx.array, mx.array]:
        shape = (len(self.settings), self._vocab)
        if self._prompted is None or self._counts is None:
            return mx.zeros(shape, dtype=mx.bool_), mx.zeros(shape, dtype=mx.int32)
        return self._prompted, self._counts

    def _changed(self) -> None:
        self._columns = None
        if not any(settings.penalised for settings in self.settings):
            self._prompted = self._counts = None

    def _on_device(self) -> _Columns:
        self._columns = self._columns or _columns(self.settings, self._vocab)
        return self._columns

    # Scores

    def scores(
        self,
        logits: mx.array,
        drafts: mx.array | None = None,
        *,
        position: mx.array | None = None,
    ) -> mx.array:
        """Logits [R, T, V] through the steps above, float32; -inf is never drawn.

        `position` int32 [R, T] are those of the tokens to be chosen; rows with `late` need it.
        With drafts int32 [R, T-1] position t stands after the first t of them; without, every
        position stands directly after the anchor.
        """
        z = logits.astype(mx.float32)
        row = self._on_device()
        if row.bias is not None:
            z = z + row.bias
        if self._counts is not None and self._prompted is not None:
            counts = self._counts[:, None]
            if drafts is not None and drafts.shape[1]:
                before = mx.cumsum(_times(drafts, self._vocab), axis=1)
                first = mx.zeros_like(before[:, :1])
                counts = counts + mx.concatenate([first, before], axis=1)
            known = (counts > 0) | self._prompted[:, None]
            scaled = mx.where(z > 0, z / row.repetition, z * row.repetition)
            z = mx.where(known, scaled, z)
            z = z - row.frequency * counts - row.presence * (counts > 0)
        if row.late is not None:
            assert position is not None
            z = mx.where(row.late & (position[..., None] < row.late_from), -mx.inf, z)
        if any(settings.random for settings in self.settings):
            z = z / row.temperature
        if any(settings.filtered for settings in self.settings):
            z = mx.where(_kept(z, row), z, -mx.inf)
        return z

    def probabilities(self, scores: mx.array) -> mx.array:
        """The law of scores [R, T, V]; of a greedy row all on its first largest score."""
        best = mx.argmax(scores, axis=-1, keepdims=True)
        sure = mx.arange(scores.shape[-1]) == best
        return mx.where(self._on_device().random, mx.softmax(scores, axis=-1, precise=True), sure)

    # Draws

    def draw(self, scores: mx.array, position: mx.array, purpose: Purpose) -> mx.array:
        """Tokens int32 [R, T] by the law of `scores` [R, T, V], for positions int32 [R, T].

        The largest of score + Gumbel noise has that law (Gumbel, 1954); of a greedy row it is the
        largest score.
        """
        noise = gumbel(self._bits(position, purpose, scores.shape[-1]))
        noisy = scores + mx.where(self._on_device().random, noise, 0.0)
        return mx.argmax(noisy, axis=-1).astype(mx.int32)

    def uniform(self, position: mx.array, purpose: Purpose) -> mx.array:
        """Numbers in [0, 1), [R, T], for positions int32 [R, T]."""
        return unit(self._bits(position, purpose, 1)[..., 0])

    def _bits(self, position: mx.array, purpose: Purpose, count: int) -> mx.array:
        """Random uint32 [R, T, count]."""
        rows, width = position.shape
        row_keys = self._on_device().keys
        counter = (position * 4 + int(purpose)).astype(mx.uint32)
        high = mx.broadcast_to(row_keys[:, :1], (rows, width))
        keys = mx.stack([high, row_keys[:, 1:] ^ counter], axis=-1).reshape(-1, 2)
        pairs = -(-count // 2)
        bits = mx.vmap(lambda key: mx.random.split(key, pairs))(keys)
        return bits.reshape(rows, width, 2 * pairs)[..., :count]


def _kept(z: mx.array, row: _Columns) -> mx.array:
    """Bool [R, T, V]: what min_p, top_k and top_p leave; always the most likely token."""
    order = mx.argsort(-z, axis=-1)
    falling = mx.take_along_axis(z, order, axis=-1)
    rank = mx.arange(z.shape[-1])
    most = falling[..., :1]
    kept = (falling >= most + mx.log(row.min_p)) & (rank < row.top_k)
    p = mx.softmax(mx.where(kept, falling, -mx.inf), axis=-1, precise=True)
    before = mx.cumsum(p, axis=-1) - p
    kept = (kept & (before < row.top_p)) | (rank == 0)
    return mx.put_along_axis(mx.zeros(z.shape, dtype=mx.bool_), order, kept, axis=-1)


def _columns(rows: Sequence[Sampling], vocab: int) -> _Columns:
    def column(values: Sequence[float]) -> mx.array:
        return mx.array(list(values), dtype=mx.float32)[:, None, None]

    late: mx.array | None = None
    if any(s.late for s in rows):
        banned = np.zeros((len(rows), 1, vocab), dtype=np.bool_)
        for row, settings in enumerate(rows):
            banned[row, 0, list(settings.late)] = True
        late = mx.array(banned)
    bias: mx.array | None = None
    if any(s.logit_bias for s in rows):
        dense = np.zeros((len(rows), 1, vocab), dtype=np.float32)
        for row, settings in enumerate(rows):
            for token, value in settings.logit_bias:
                dense[row, 0, token] += value
        bias = mx.array(dense)
    return _Columns(
        random=mx.array([s.random for s in rows])[:, None, None],
        temperature=column([s.temperature if s.random else 1.0 for s in rows]),
        repetition=column([s.repetition_penalty for s in rows]),
        frequency=column([s.frequency_penalty for s in rows]),
        presence=column([s.presence_penalty for s in rows]),
        # A row without a limit gets one that nothing reaches, rounding included.
        top_k=column([s.top_k if s.filtered and s.top_k else vocab for s in rows]),
        top_p=column([s.top_p if s.filtered and s.top_p < 1 else 2.0 for s in rows]),
        min_p=column([s.min_p if s.filtered else 0.0 for s in rows]),
        keys=mx.array(np.array([_row_key(s) for s in rows], dtype=np.uint32)),
        bias=bias,
        late=late,
        late_from=mx.array([s.late_from for s in rows], dtype=mx.int32)[:, None, None],
    )


def unit(bits: mx.array) -> mx.array:
    """uint32 to numbers in [0, 1), by their upper 24 bits: float32 holds those exactly."""
    return (bits >> 8).astype(mx.float32) * 2.0**-24


def gumbel(bits: mx.array) -> mx.array:
    """uint32 to standard Gumbel noise: -log E, E = -log(1 - u), u = (bits + ½) / 2³².

    Large values come from small u, where float32 is fine-grained: improbable tokens keep their
    due down to about 2⁻³³.
    """
    u = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -mx.log(-mx.log1p(-u))


def _times(tokens: mx.array, vocab: int, counts: mx.array | None = None) -> mx.array:
    """int32 [R, T, V]: 1 at each of the tokens int32 [R, T] that counts (bool [R, T])."""
    here = tokens[..., None] == mx.arange(vocab, dtype=mx.int32)
    return (here if counts is None else here & counts[..., None]).astype(mx.int32)


def _row_key(settings: Sampling) -> tuple[int, int]:
    """64 bits of a seed and a choice."""
    name = f"{settings.seed}/{settings.choice}".encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest[:4]), int.from_bytes(digest[4:])
