"""Prefill: prompts in, staged rows and first tokens out, the shared prefix computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_batch.decoder.arena import column_step
from dflash_batch.decoder.cycle import Slots, prefill
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.prefix import WORTH, Held, Tokens, best_shared, saving
from dflash_batch.decoder.targets.base import Target

MOST_ROWS = 8
"""Most rows of one prefill forward."""

CHUNK = 512
"""Most tokens per row of one prefill forward."""


class Staged(NamedTuple):
    """Prompts that have been run: row i of `slots` is prompt i, not live yet."""

    slots: Slots
    first: npt.NDArray[np.int32]  # [n] the target's token after each prompt
    computed: list[int]  # prompt tokens run for each, a newly held prefix counted on the first


class Prefiller:
    """Groups waiting prompts behind the prefix they share, and runs them."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target = target
        self._drafter = drafter
        self._held: Held | None = None

    def group(self, prompts: Sequence[Tokens], most: int) -> int:
        """How many of `prompts`, from the first on, should be run together.

        All that the prefix to be held for the first serves about as well as any would.
        """
        saved = self._will_hold(prompts)
        for n in range(1, min(len(prompts), most, MOST_ROWS)):
            others = [*prompts[:n], *prompts[n + 1 :]]
            have = 0 if saved is None else saving(prompts[n], saved, self._target.cuttable)
            if best_shared(prompts[n], others) - have >= WORTH:
                return n
        return min(len(prompts), most, MOST_ROWS)

    def run(self, prompts: Sequence[Tokens], waiting: Sequence[Tokens] = ()) -> Staged:
        """Prefill a group; `waiting` are prompts behind it that may want the same prefix."""
        held_now = self._hold([*prompts, *waiting])
        bases = [self._saved(prompt) for prompt in prompts]
        slots = Slots(len(prompts), self._target, self._drafter)
        rests = [prompt[base:] for prompt, base in zip(prompts, bases, strict=True)]
        first = self._forward(slots, bases, rests)
        computed = [len(rest) for rest in rests]
        computed[0] += held_now
        return Staged(slots, first, computed)

    def forget(self) -> None:
        """Give the held prefix back."""
        self._held = None

    def _saved(self, prompt: Tokens) -> int:
        return 0 if self._held is None else self._held.match(prompt)

    def _will_hold(self, prompts: Sequence[Tokens]) -> Tokens | None:
        """The prefix that is held, or that the first of `prompts` makes worth holding."""
        first = prompts[0]
        shared = best_shared(first, prompts[1:])
        if shared - self._saved(first) >= WORTH:
            return first[:shared]
        return None if self._held is None else self._held.tokens

    def _hold(self, prompts: Sequence[Tokens]) -> int:
        """Hold what the first of `prompts` shares with others; return the tokens it cost."""
        prefix = self._will_hold(prompts)
        if prefix is None or (self._held is not None and prefix is self._held.tokens):
            return 0
        base = self._saved(prefix)
        slots = Slots(1, self._target, self._drafter)
        self._forward(slots, [base], [prefix[base:]])
        length = len(prefix)
        target, draft = slots.arena.snapshot(0, length), slots.draft.snapshot(0, length)
        mx.eval(target.arrays())
        self._held = Held(prefix, target, draft)
        return length - base

    def _forward(
        self, slots: Slots, bases: Sequence[int], rests: Sequence[Tokens]
    ) -> npt.NDArray[np.int32]:
        """Run `rests` behind the held prefix's first `bases` tokens, in ragged chunks.

        row 0   [held ········][rest ·····]
        row 1   [held ····][rest ·········|···]
                                 one chunk
        """
        for row, base in enumerate(bases):
            if base and self._held is not None:
                slots.arena.load(row, self._held.target.first(base))
                slots.draft.load(row, self._held.draft.first(base))
        slots.lens.offset = mx.array(list(bases), dtype=mx.int32)
        first = np.zeros(len(rests), dtype=np.int32)
        longest = max(map(len, rests))
        for done in range(0, longest, CHUNK):
            width = _padded(min(CHUNK, longest - done))
            tokens = np.zeros((len(rests), width), dtype=np.int32)
            count = np.zeros(len(rests), dtype=np.int32)
            for row, rest in enumerate(rests):
                piece = rest[done : done + CHUNK]
                tokens[row, : len(piece)] = piece
                count[row] = len(piece)
            slots.lens.bound = max(
                base + min(done, len(rest)) for base, rest in zip(bases, rests, strict=True)
            )
            after = prefill(slots, self._target, self._drafter, mx.array(tokens), mx.array(count))
            mx.eval(after, slots.lens.offset, *slots.arena.arrays())
            first = np.where(count > 0, np.array(after), first)
        return first


def _padded(width: int) -> int:
    """A few chunk shapes on a GPU; exact ones on the CPU, where padding is computed."""
    if column_step() >= 256:
        return max(16, 1 << (width - 1).bit_length())
    return width
