"""Texts in batches of few shapes: each step's batch is a function of the seed and its number.

Texts of like length share a batch, one a row, padded on the right (a causal target and the draft
look to the left only):

    length     128              512
    rows       batch/128        batch/512        about as many tokens in each batch
    anchors    32 a row         128 a row        and so as many blocks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_batch.decoder.training.corpus import Rows
from dflash_batch.decoder.training.objective import draw_anchors
from dflash_batch.decoder.training.texts import Text

LENGTHS = (64, 128, 192, 256, 320, 384, 512, 768, 1024)
"""Row lengths: each shape is compiled and planned anew. Longer texts are cut."""

TOKENS_PER_ANCHOR = 4


class Batch(NamedTuple):
    """Host arrays of one step; [N, T] and [N, A]."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]  # the reply's tokens
    anchors: NDArray[np.int32]
    real: NDArray[np.bool_]  # of the anchors


class _Bucket(NamedTuple):
    length: int
    rows: int  # of a batch
    texts: list[int]


class Batches:
    """Endless batches of `texts`, about `size` tokens each."""

    def __init__(self, texts: Sequence[Text], size: int, seed: int) -> None:
        self._texts, self._seed = texts, seed
        self._buckets = _buckets(texts, size)
        self._epoch = -1
        self._plan: list[tuple[_Bucket, list[int]]] = []
        self.per_epoch = sum(-(-len(b.texts) // b.rows) for b in self._buckets)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and length of the batches there are."""
        return [(bucket.rows, bucket.length) for bucket in self._buckets]

    def at(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._planned(epoch)
        bucket, chosen = self._plan[place]
        tokens, supervised = padded([self._texts[i] for i in chosen], bucket.length)
        rng = np.random.default_rng((self._seed, step))
        count = max(1, bucket.length // TOKENS_PER_ANCHOR)
        return Batch(tokens, supervised, *draw_anchors(supervised, count, rng))

    def _planned(self, epoch: int) -> list[tuple[_Bucket, list[int]]]:
        """Every text once, in a random order; batches that would be short begin anew."""
        rng = np.random.default_rng((self._seed, epoch, 1))
        plan = []
        for bucket in self._buckets:
            order = rng.permutation(bucket.texts).tolist()
            for at in range(0, len(order), bucket.rows):
                chosen = order[at : at + bucket.rows]
                plan.append((bucket, chosen + order[: bucket.rows - len(chosen)]))
        return [plan[i] for i in rng.permutation(len(plan)).tolist()]


def padded(texts: Sequence[Text], length: int) -> Rows:
    """Texts as rows of `length` tokens; what is longer is cut."""
    tokens = np.zeros((len(texts), length), np.int32)
    supervised = np.zeros((len(texts), length), np.bool_)
    for row, text in enumerate(texts):
        stop = min(text.length, length)
        tokens[row, :stop] = (text.prompt + text.reply)[:length]
        supervised[row, len(text.prompt) : stop] = True
    return Rows(tokens, supervised)


def _buckets(texts: Sequence[Text], size: int) -> list[_Bucket]:
    """Texts by length. Too few for a batch of their own join the next longer ones."""
    by_length = deque(sorted(range(len(texts)), key=lambda i: texts[i].length))
    found: list[_Bucket] = []
    waiting: list[int] = []
    for length in LENGTHS:
        last = length == LENGTHS[-1]
        while by_length and (last or texts[by_length[0]].length <= length):
            waiting.append(by_length.popleft())
        rows = max(1, size // length)
        if len(waiting) >= rows or (waiting and not by_length):
            found.append(_Bucket(length, min(rows, len(waiting)), waiting))
            waiting = []
        if not by_length:
            break
    return found
