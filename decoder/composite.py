"""A drafter of several sources: a model's drafts, the row's own text, the finished texts of a job.

Each row takes in each cycle the source that promises most, by how sources have fared (`marks`), so
one block holds drafts of several kinds:

    row 0   anchor  m m m m m m m       m: the model's
    row 1   anchor  r r r r r r r       r: what followed in its own text
    row 2   anchor  j j j . . . .       j: what followed in a text that is finished; 3 were found

All is searched and chosen on the device; the host only adds finished texts. With a model that
proposes nothing this is lookup alone, and costs no forward but the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.drafters import Drafter, DrafterSpec, DrafterState, Proposal
from dflash_batch.decoder.history import NOTHING, History, Said
from dflash_batch.decoder.lookup import LONGEST, Guess, in_row, in_texts, key_of
from dflash_batch.decoder.marks import FADE, LEAN, ROW_FADE, ROW_LEAN, Marks, marked, promise

GPU_TEXTS, CPU_TEXTS = 16384, 2048
"""Tokens of finished texts that are searched."""


class Source(IntEnum):
    """Who drafts. Of two that promise the same, the first does."""

    MODEL = 0
    ROW = 1
    JOB = 2


BANDS = (3, 5, LONGEST)
"""Lengths of a match that begin a new band: 1-2, 3-4, 5-7, 8."""

_OPENING = ((0.75,) * 4, (0.3, 0.55, 0.75, 0.88), (0.3, 0.55, 0.75, 0.88))
"""What is thought of a source before it has been seen: share of drafts that stand, by band."""


class _Asked(NamedTuple):
    """What the sources said in a cycle, to be held against the text."""

    offset: mx.array  # int32 [R]: where the anchor stood
    drafts: mx.array  # int32 [R, S, k]
    meant: mx.array  # int32 [R, S]: how many of them count
    band: mx.array  # int32 [R, S]
    chosen: mx.array  # int32 [R]


class _Remembered(NamedTuple):
    """A row of a `CompositeState`. Immutable."""

    length: int
    said: Said
    model: Any

    def first(self, length: int) -> _Remembered:
        return _Remembered(length, self.said.first(length), self.model.first(length))


class CompositeState:
    """The model's state, the rows' texts, and how sources have fared in them."""

    def __init__(self, model: DrafterState, lens: Lens) -> None:
        self.lens = lens
        self.model = model
        self.history = History(lens)
        self.marks = Marks(lens.rows, len(Source), len(BANDS) + 1)
        self.asked: _Asked | None = None  # in the cycle that is under way
        self.answered: _Asked | None = None  # in the one before

    def snapshot(self, row: int, length: int) -> _Remembered:
        said = self.history.snapshot(row, length)
        return _Remembered(length, said, self.model.snapshot(row, length))

    def load(self, row: int, snapshot: _Remembered) -> None:
        self.model.load(row, snapshot.model)
        self.history.load(row, snapshot.said)
        self.marks.clear(row)
        self.asked = self.answered = None  # one cycle goes unmarked

    def select(self, rows: mx.array) -> None:
        self.model.select(rows)
        self.history.select(rows)
        self.marks.select(rows)
        self.asked = self.answered = None


class CompositeDrafter:
    """A `Drafter` that gives each row the drafts of the source that promises most.

    `model` may be a `NoDrafter`; `block` is its longest block unless another is named. Which texts
    have ended decides drafts, never tokens: of a batch that samples by `Rejection` a seed's text
    is then another one in other company, though of the same law.
    """

    def __init__(self, model: Drafter, block: int | None = None) -> None:
        self.model = model
        self.config: Any = getattr(model, "config", None)
        self.spec = DrafterSpec(
            kind=f"{model.spec.kind}+ngram" if model.spec.max_k else "ngram",
            taps=model.spec.taps,
            max_k=model.spec.max_k if block is None else block - 1,
            bytes_per_token=model.spec.bytes_per_token + mx.int32.size,
        )
        self._texts = FinishedTexts(GPU_TEXTS if mx.default_device() == mx.gpu else CPU_TEXTS)
        self._marks = Marks(1, len(Source), len(BANDS) + 1)  # of all rows together

    def new_state(self, lens: Lens) -> CompositeState:
        return CompositeState(self.model.new_state(lens), lens)

    def propose(self, state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        own = self.model.propose(state.model, anchor, width, k)
        if k == 0:
            state.answered = None
            return own
        end = state.lens.offset
        state.lens.open(k + 1)
        text = state.history.text(anchor)
        self._mark(state, text)
        key = key_of(text, end)
        guesses = [_of_model(own), in_row(text, end, key, k), in_texts(self._texts.tokens, key, k)]
        drafts, meant, length = (
            mx.stack(list(parts), axis=1) for parts in zip(*guesses, strict=True)
        )
        meant = mx.minimum(meant, mx.maximum(width - 1, 0)[:, None])
        band = (length[..., None] >= mx.array(BANDS)).sum(axis=-1).astype(mx.int32)
        chosen = mx.argmax(promise(self._rates(state, band), meant, k), axis=1).astype(mx.int32)
        state.asked = _Asked(end, drafts, meant, band, chosen)
        return _merged(own, chosen, drafts, meant)

    def commit(
        self, state: Any, tokens: mx.array, features: mx.array | None, keep: mx.array
    ) -> None:
        self.model.commit(state.model, tokens, features, keep)
        state.history.write(tokens)
        if state.asked is not None:
            # Of the source in use, what was verified counts: drawn, where the row samples.
            asked = state.asked
            verified = (_sources() == asked.chosen[:, None])[..., None]
            drafts = mx.where(verified, tokens[:, None, 1:], asked.drafts)
            state.answered, state.asked = asked._replace(drafts=drafts), None

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._texts.add([*prompt[1 - LONGEST :], *output])
        self.model.learn(prompt, output)

    def _mark(self, state: CompositeState, text: mx.array) -> None:
        """Hold the last drafts against what was said since."""
        if state.answered is None:
            return
        asked, k = state.answered, state.answered.drafts.shape[-1]
        place = asked.offset[:, None] + 1 + mx.arange(k, dtype=mx.int32)
        truth = mx.take_along_axis(text, mx.minimum(place, text.shape[1] - 1), axis=1)
        counts = marked(asked.drafts, asked.meant, truth, state.lens.offset - asked.offset)
        here = asked.band[..., None] == mx.arange(len(BANDS) + 1)
        kept, tried = (mx.where(here, n[..., None], 0).astype(mx.float32) for n in counts)
        state.marks.add(kept, tried, ROW_FADE)
        self._marks.add(kept.sum(axis=0)[None], tried.sum(axis=0)[None], FADE)

    def _rates(self, state: CompositeState, band: mx.array) -> mx.array:
        """Share of drafts that stand, [R, S], for the band of each source's guess."""
        common = self._marks.rate(mx.array(_OPENING)[None], LEAN)
        rates = state.marks.rate(common, ROW_LEAN)
        return mx.take_along_axis(rates, band[..., None], axis=-1)[..., 0]


class FinishedTexts:
    """The newest texts of rows that ended, as one array for all rows to search.

    Grown by doubling, so that shapes are few; in front lies what was said long ago, and the oldest
    text is dropped first.
    """

    SMALLEST = 256

    def __init__(self, most: int) -> None:
        self._most = most
        self._said = np.zeros(0, dtype=np.int32)
        self._tokens: mx.array | None = None

    def add(self, text: Sequence[int]) -> None:
        """A row has said `text`."""
        new = np.array([*text, NOTHING], dtype=np.int32)
        self._said = np.concatenate([self._said, new])[-self._most :]
        self._tokens = None

    @property
    def tokens(self) -> mx.array:
        """int32 [S], each text ended by NOTHING."""
        if self._tokens is None:
            size = max(self.SMALLEST, 1 << (len(self._said) - 1).bit_length())
            padded = np.full(size, NOTHING, dtype=np.int32)
            padded[size - len(self._said) :] = self._said
            self._tokens = mx.array(padded)
        return self._tokens


def _sources() -> mx.array:
    return mx.arange(len(Source), dtype=mx.int32)


def _of_model(own: Proposal) -> Guess:
    rows, k = own.tokens.shape
    full = mx.full((rows,), k, dtype=mx.int32)
    return Guess(own.tokens, full if own.meant is None else own.meant, mx.zeros_like(full))


def _merged(own: Proposal, chosen: mx.array, drafts: mx.array, meant: mx.array) -> Proposal:
    """Each row's drafts from its source; what was looked up is certain to be drafted."""
    tokens = mx.take_along_axis(drafts, chosen[:, None, None], axis=1)[:, 0]
    meant = mx.take_along_axis(meant, chosen[:, None], axis=1)[:, 0]
    if own.logits is None:
        return Proposal(tokens, meant=meant)
    sure = tokens[..., None] == mx.arange(own.logits.shape[-1], dtype=mx.int32)
    point = mx.where(sure, 0.0, -mx.inf).astype(own.logits.dtype)
    drawn = (chosen == Source.MODEL)[:, None, None]
    return Proposal(tokens, mx.where(drawn, own.logits, point), meant)
