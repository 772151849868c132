"""The target's own replies to many prompts, in waves: rows begin together and are read seldom.

The engine serves rows as they come; here all are known beforehand. Prompts of like length start in
one wave, the host reads tokens only every STRIDE cycles, and when a good part of a wave has ended
the others move together. So a wave can be a thousand rows wide on a large GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash_batch.decoder.acceptance import Coupled, Greedy
from dflash_batch.decoder.arena import column_step
from dflash_batch.decoder.cycle import Slots, cycle, prefill
from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.prefill import CHUNK
from dflash_batch.decoder.sampling import Purpose
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.training.texts import Prompt, Text
from dflash_batch.decoder.types import Sampling

STRIDE = 16
"""Cycles between two looks at the tokens."""

POOL = 8
"""Waves' worth of prompts that are sorted by length together."""

PREFILL_TOKENS = 1 << 16
"""Most tokens of one prefill forward."""

TEMPERATURE = 0.7
"""Of the replies beyond a prompt's first."""


@dataclass(frozen=True)
class Wish:
    """What to generate: replies of at most `max_tokens` in waves of `width` rows."""

    max_tokens: int
    width: int
    seed: int
    samples: int = 1  # replies a prompt; the first is greedy
    until: float = math.inf  # time.monotonic() after which no wave is begun


def replies(
    target: Target,
    prompts: Sequence[Prompt],
    stops: frozenset[int],
    wish: Wish,
    done: set[tuple[int, int]],
    wanted: Callable[[], bool] = lambda: True,
) -> Iterator[list[Text]]:
    """Texts as they end, without those in `done`, until all are there.

    Prompts come in a random order, so that a run cut short has a fair sample of them. After
    `wish.until`, or when `wanted()` says no, rows that have not ended are left out.
    """
    for sample in range(wish.samples):
        left = [prompt for prompt in prompts if (prompt.name, sample) not in done]
        order = np.random.default_rng((wish.seed, sample)).permutation(len(left)).tolist()
        for first in range(0, len(left), POOL * wish.width):
            pool = [left[i] for i in order[first : first + POOL * wish.width]]
            pool.sort(key=lambda prompt: len(prompt.tokens))
            waves = [pool[at : at + wish.width] for at in range(0, len(pool), wish.width)]
            for i in np.random.default_rng((wish.seed, sample, first)).permutation(len(waves)):
                if time.monotonic() > wish.until or not wanted():
                    return
                yield from _Wave(target, waves[i], stops, wish, sample).run(wanted)


class _Wave:
    """Rows that begin together."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        stops: frozenset[int],
        wish: Wish,
        sample: int,
    ) -> None:
        self._target, self._wish, self._sample = target, wish, sample
        self._stops = np.array(sorted(stops), dtype=np.int32)
        self._prompts = list(prompts)
        self._rule = Coupled() if sample else Greedy()
        self._drafter = NoDrafter()
        self._slots = Slots(len(prompts), target, self._drafter)
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._open = np.ones(len(prompts), dtype=np.bool_)  # rows that have not ended
        for row, prompt in enumerate(prompts if sample else ()):
            sampling = Sampling(TEMPERATURE, seed=wish.seed + prompt.name, choice=sample)
            self._slots.sampler.place(row, sampling, (), ())

    def run(self, wanted: Callable[[], bool]) -> Iterator[list[Text]]:
        """Texts as they end."""
        slots = self._slots
        first = self._first()
        room = [self._room(prompt) for prompt in self._prompts]
        slots.anchor, slots.remaining = first, mx.array(room, dtype=mx.int32) - 1
        bound = max(len(prompt.tokens) for prompt in self._prompts)
        fresh = [first[:, None]]
        while self._prompts and wanted():
            for _ in range(STRIDE):
                slots.lens.bound = bound
                verdict, _ = cycle(slots, self._target, self._drafter, 0, self._rule)
                fresh.append(verdict.chosen)
                bound += 1
                mx.async_eval(verdict.chosen, slots.anchor, slots.lens.offset, slots.remaining)
            ended = self._take(np.array(mx.concatenate(fresh, axis=1)))
            fresh = []
            yield [self._text(row) for row in np.flatnonzero(ended & self._open).tolist()]
            self._open &= ~ended
            if not self._open.any():
                return
            if self._open.mean() <= 0.75:
                self._gather()

    def _first(self) -> mx.array:
        """Run the prompts, in pieces of few shapes; the first token of each reply, int32 [R]."""
        slots, rows = self._slots, len(self._prompts)
        lengths = np.array([len(prompt.tokens) for prompt in self._prompts])
        most = max(32, min(CHUNK, PREFILL_TOKENS // rows))
        piece = min(most, _padded(int(lengths.max())))
        padded = np.zeros((rows, -(-lengths.max() // piece) * piece), dtype=np.int32)
        for row, prompt in enumerate(self._prompts):
            padded[row, : lengths[row]] = prompt.tokens
        logits = mx.zeros((rows, self._target.vocab_size))
        for start in range(0, padded.shape[1], piece):
            count = np.clip(lengths - start, 0, piece).astype(np.int32)
            slots.lens.bound = min(start, int(lengths.max()))
            given = mx.array(padded[:, start : start + piece])
            after = prefill(slots, self._target, self._drafter, given, mx.array(count))
            logits = mx.where(mx.array(count > 0)[:, None], after, logits)
            mx.eval(logits, slots.lens.offset, *slots.arena.arrays())
        if not self._sample:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        none = mx.zeros((rows, 0), dtype=mx.int32)
        scores = slots.sampler.scores(logits[:, None], none)
        return slots.sampler.draw(scores, slots.lens.offset[:, None], Purpose.CHOICE)[:, 0]

    def _room(self, prompt: Prompt) -> int:
        left = self._target.context_length - len(prompt.tokens)
        return max(1, min(prompt.max_tokens or self._wish.max_tokens, self._wish.max_tokens, left))

    def _take(self, fresh: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Add tokens [R, n] to their rows; which rows have ended."""
        stop = np.isin(fresh, self._stops)
        ended = np.zeros(len(fresh), dtype=np.bool_)
        for row in np.flatnonzero(self._open).tolist():
            tokens, room = self._tokens[row], self._room(self._prompts[row])
            end = int(stop[row].argmax()) + 1 if stop[row].any() else fresh.shape[1]
            tokens += fresh[row, :end].tolist()
            del tokens[room:]
            ended[row] = bool(stop[row].any()) or len(tokens) >= room
        return ended

    def _text(self, row: int) -> Text:
        prompt = self._prompts[row]
        return Text(prompt.name, self._sample, prompt.tokens, self._tokens[row], prompt.kind)

    def _gather(self) -> None:
        """Only the open rows go on. Their number has few values, so shapes are few."""
        live = np.flatnonzero(self._open).tolist()
        width = min(_width(len(live)), len(self._prompts))
        rows = (live + live[-1:] * width)[:width]  # some twice: the second one counts for nothing
        self._slots.select(rows)
        self._prompts = [self._prompts[row] for row in rows]
        self._tokens = [list(self._tokens[row]) for row in rows]
        self._open = np.arange(width) < len(live)


def _width(rows: int) -> int:
    """`rows` or a little more: 1, 2, 3, 4, 6, 8, 12, 16, …"""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


def _padded(width: int) -> int:
    """A few shapes on a GPU; exact ones on the CPU, where padding is computed."""
    return 1 << (width - 1).bit_length() if column_step() >= 256 else width
