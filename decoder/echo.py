"""Prompts that are scored: staged like any other, with the log probability of each of their tokens.

Every such prompt is run whole, from its first token: a held prefix would hide the logits inside it.
The logits of all positions are never in memory together: a forward runs some rows and some of their
tokens, and its hidden states go through the head a few positions at a time.

    position   0   1   2   3            logits at 0 tell of token 1, and so on; those at the last
    token      a   b   c   d            position are for the first token of the answer
    log p      -   ↖a  ↖b  ↖c
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.cycle import Slots, run
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.logprobs import Shown, show
from dflash_batch.decoder.prefill import MOST_ROWS, Staged
from dflash_batch.decoder.prefix import Origin, Tokens
from dflash_batch.decoder.row import Row
from dflash_batch.decoder.targets.base import Target

MOST_LOGITS = 1 << 24
"""Most logits at a time: 64 MiB in float32, and a few times that while they are sorted."""

_GRAIN = 16
"""Tokens per row of a forward are a multiple of this: fewer shapes."""


class Scorer:
    """Runs prompts that are scored, as `Prefiller` runs the others."""

    def __init__(self, target: Target, drafter: Drafter, chunk: Callable[[int], int]) -> None:
        """`chunk` says how many tokens per row a forward of so many rows may have now."""
        self._target = target
        self._drafter = drafter
        self._chunk = chunk

    def group(self, prompts: Sequence[Tokens], most: int) -> int:
        """How many of `prompts`, from the first on, are run together."""
        return min(len(prompts), most, MOST_ROWS)

    def run(self, rows: Sequence[Row]) -> Generator[None, None, Staged]:
        """Run the whole prompts of a group and note what they score; yields between chunks."""
        prompts = [row.prompt for row in rows]
        slots = Slots(len(rows), self._target, self._drafter)
        logits = mx.zeros((len(rows), self._target.vocab_size), dtype=self._target.dtype)
        parts: list[list[Shown]] = [[] for _ in rows]
        longest, done = max(map(len, prompts)), 0
        while done < longest:
            width = -(-min(self._chunk(len(rows)), longest - done) // _GRAIN) * _GRAIN
            pieces = [prompt[done : done + width] for prompt in prompts]
            hidden = self._forward(slots, pieces, width, done)
            for i, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True)):
                parts[i] += self._show(hidden[i], prompt[done + 1 : done + 1 + width])
                if len(piece) and done + len(piece) == len(prompt):
                    here = (mx.arange(len(rows)) == i)[:, None]
                    last = self._target.logits(hidden[i, len(piece) - 1][None, None])[0]
                    logits = mx.where(here, last, logits)
            mx.eval(logits)
            done += width
            if done < longest:
                yield
        for row, shown in zip(rows, parts, strict=True):
            row.show_prompt(shown)
        whole = (Origin(len(prompt), 0, 0, 0.0, None) for prompt in prompts)
        return Staged(slots, logits, list(whole))

    def _forward(self, slots: Slots, pieces: Sequence[Tokens], width: int, done: int) -> mx.array:
        """Hidden states [R, width, h] of the next piece of each prompt."""
        tokens = np.zeros((len(pieces), width), dtype=np.int32)
        for row, piece in enumerate(pieces):
            tokens[row, : len(piece)] = piece
        count = mx.array([len(piece) for piece in pieces], dtype=mx.int32)
        slots.lens.bound = done
        hidden = run(slots, self._target, self._drafter, mx.array(tokens), count)
        mx.eval(hidden, slots.lens.offset, *slots.arena.arrays())
        return hidden

    def _show(self, hidden: mx.array, following: Tokens) -> list[Shown]:
        """Of the positions [T, h] that have a token following, a few at a time."""
        step = max(1, MOST_LOGITS // self._target.vocab_size)
        parts = []
        for start in range(0, len(following), step):
            tokens = mx.array(following[None, start : start + step])
            logits = self._target.logits(hidden[None, start : start + tokens.shape[1]])
            parts.append(show(logits, tokens))
            mx.eval(*parts[-1])
        return parts
