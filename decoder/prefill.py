"""Prefill: prompts in, staged rows and logits out, the shared prefix computed once."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.arena import column_step
from dflash_batch.decoder.cycle import Slots, prefill
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.prefix import (
    MOST_HELD,
    WORTH,
    Held,
    Tokens,
    best_shared,
    branches,
    saving,
)
from dflash_batch.decoder.targets.base import Target

MOST_ROWS = 8
"""Most rows of one prefill forward."""

CHUNK = 512
"""Most tokens per row of one prefill forward."""

LEAST = 64
"""Fewest tokens of a row that are worth a forward of their own, while others wait."""


class Staged(NamedTuple):
    """Prompts that have been run: row i of `slots` is prompt i, not live yet."""

    slots: Slots
    logits: mx.array  # [n, V]: the target's, after each prompt
    computed: list[int]  # prompt tokens run for each, a newly held prefix counted on the first


class Start(NamedTuple):
    """Where a prompt is taken up: behind the first `length` tokens of a held prefix."""

    length: int
    held: Held | None

    def load(self, slots: Slots, row: int) -> None:
        """Put what is held into a row."""
        if self.held is not None:
            slots.arena.load(row, self.held.target.first(self.length))
            slots.draft.load(row, self.held.draft.first(self.length))


_COLD = Start(0, None)


class Prefiller:
    """Groups waiting prompts behind the prefix they share, and runs them."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target = target
        self._drafter = drafter
        self._held: list[Held] = []  # each one a prefix of the next
        self.rate: float | None = None  # prompt tokens a second, lately
        self.most_tokens: int | None = None  # of one forward, all rows together, if it is limited

    def group(self, prompts: Sequence[Tokens], most: int) -> int:
        """How many of `prompts`, from the first on, should be run together.

        All that the prefix to be held for the first serves about as well as any would.
        """
        saved = self._plan(prompts)
        for n in range(1, min(len(prompts), most, MOST_ROWS)):
            others = [*prompts[:n], *prompts[n + 1 :]]
            have = max((self._saving(prompts[n], prefix) for prefix in saved), default=0)
            if best_shared(prompts[n], others) - have >= WORTH:
                return n
        return min(len(prompts), most, MOST_ROWS)

    def rides(self, prompt: Tokens, others: Sequence[Tokens], most: int) -> Start | None:
        """Where `prompt` starts, if no more than `most` tokens are left of it from there.

        None also if `others` share so much more of it that this should be held first.
        """
        start = self._start(prompt)
        if start.held is None or len(prompt) - start.length > most:
            return None
        return start if best_shared(prompt, others) - start.length < WORTH else None

    def run(
        self, prompts: Sequence[Tokens], waiting: Sequence[Tokens] = ()
    ) -> Generator[None, None, Staged]:
        """Prefill a group; yields between chunks.

        `waiting` are prompts behind the group that may want the same prefix.
        """
        held_now = yield from self._hold([*prompts, *waiting])
        starts = [self._start(prompt) for prompt in prompts]
        slots = Slots(len(prompts), self._target, self._drafter)
        logits = yield from self._forward(slots, starts, prompts)
        computed = [len(p) - start.length for p, start in zip(prompts, starts, strict=True)]
        computed[0] += held_now
        return Staged(slots, logits, computed)

    def forget(self) -> None:
        """Give the held prefixes back."""
        self._held = []

    def _saving(self, prompt: Tokens, held: Tokens) -> int:
        return saving(prompt, held, self._target.cuttable)

    def _start(self, prompt: Tokens) -> Start:
        """The held prefix that saves most of `prompt`."""
        starts = (Start(self._saving(prompt, held.tokens), held) for held in self._held)
        best = max(starts, key=lambda start: start.length, default=_COLD)
        return best if best.length >= WORTH else _COLD

    def _plan(self, prompts: Sequence[Tokens]) -> list[Tokens]:
        """The prefixes held once the first of `prompts` has been seen to, shortest first."""
        first = prompts[0]
        points = branches(first, prompts[1:])
        have = self._start(first).length
        if not points or points[-1] - have < WORTH:
            return [held.tokens for held in self._held]
        if self._target.cuttable:
            return [first[: points[-1]]]
        kept = [held.tokens for held in self._held if self._saving(first, held.tokens)]
        plan = kept + [first[:n] for n in points if n - have >= WORTH]
        return plan if len(plan) <= MOST_HELD else [plan[0], *plan[1 - MOST_HELD :]]

    def _hold(self, prompts: Sequence[Tokens]) -> Generator[None, None, int]:
        """Hold what the first of `prompts` shares with others; return the tokens it cost."""
        plan, cost = self._plan(prompts), 0
        for prefix in plan:
            if any(prefix is held.tokens for held in self._held):
                continue
            start, length = self._start(prefix), len(prefix)
            slots = Slots(1, self._target, self._drafter)
            yield from self._forward(slots, [start], [prefix])
            yield
            target, draft = slots.arena.snapshot(0, length), slots.draft.snapshot(0, length)
            mx.eval(target.arrays())
            self._held.append(Held(prefix, target, draft))
            cost += length - start.length
        self._held = [held for held in self._held if any(held.tokens is p for p in plan)]
        return cost

    def _forward(
        self, slots: Slots, starts: Sequence[Start], prompts: Sequence[Tokens]
    ) -> Generator[None, None, mx.array]:
        """Run the rest of each prompt behind its start, in ragged chunks; return the logits.

        Yields between two chunks.

        row 0   [held ········][rest ·····]
        row 1   [held ····][rest ·········|···]
                                 one chunk
        """
        bases = [start.length for start in starts]
        rests = [prompt[base:] for prompt, base in zip(prompts, bases, strict=True)]
        for row, start in enumerate(starts):
            start.load(slots, row)
        slots.lens.offset = mx.array(bases, dtype=mx.int32)
        logits: mx.array | None = None
        longest, done = max(map(len, rests)), 0
        while done < longest:
            chunk = min(self.chunk(len(rests)), longest - done)
            width = _padded(chunk)
            tokens = np.zeros((len(rests), width), dtype=np.int32)
            count = np.zeros(len(rests), dtype=np.int32)
            for row, rest in enumerate(rests):
                piece = rest[done : done + chunk]
                tokens[row, : len(piece)] = piece
                count[row] = len(piece)
            slots.lens.bound = max(
                base + min(done, len(rest)) for base, rest in zip(bases, rests, strict=True)
            )
            after = prefill(slots, self._target, self._drafter, mx.array(tokens), mx.array(count))
            ran = mx.array(count > 0)[:, None]
            logits = after if logits is None else mx.where(ran, after, logits)
            before = time.perf_counter()
            mx.eval(logits, slots.lens.offset, *slots.arena.arrays())
            rate = int(count.sum()) / (time.perf_counter() - before)
            self.rate = rate if self.rate is None else 0.7 * self.rate + 0.3 * rate
            done += chunk
            if done < longest:
                yield
        assert logits is not None
        return logits

    def chunk(self, rows: int) -> int:
        """Most tokens per row of the next forward."""
        if self.most_tokens is None:
            return CHUNK
        return min(CHUNK, max(LEAST, self.most_tokens // rows // LEAST * LEAST))


def _padded(width: int) -> int:
    """A few chunk shapes on a GPU; exact ones on the CPU, where padding is computed."""
    if column_step() < 256:
        return width
    return -(-width // 64) * 64 if width > 64 else max(16, 1 << (width - 1).bit_length())
