"""Prefixes of prompts: what two share, and one that was prefilled.

A held prefix has the target's and the drafter's state behind it. Pure attention can be cut to any
length, so a row takes as much of it as its own prompt agrees with. A recurrent state, or a
window's columns, are taken whole or not at all, so there each branch point on the way is held:

    system prompt ─┬─ question 1 ─┬─ …        held for the first row: the system prompt, and
                   │              └─ …        question 1 behind it
                   └─ question 2 ─── …        takes the system prompt
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_batch.decoder.arena import RowSnapshot

Tokens = npt.NDArray[np.int32]


def common(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if len(differs) else n


def saving(prompt: Tokens, held: Tokens, cuttable: bool) -> int:
    """How much of `prompt` a state after `held` can stand for.

    Its last token is always run, for its logits.
    """
    n = min(common(prompt, held), len(prompt) - 1)
    return n if cuttable or n == len(held) else 0


@dataclass(eq=False, slots=True)
class Held:
    """A prefilled prefix. `logits` ([V], behind its last token) if it is a prompt as a whole."""

    tokens: Tokens
    target: RowSnapshot
    draft: Any  # the drafter's snapshot
    bytes: int  # of both
    ssd: int = 0  # leading tokens that were read from SSD, not computed
    logits: Any = None
    made: float = field(default_factory=time.perf_counter)

    def serves(self, prompt: Tokens, cuttable: bool) -> int:
        """How many leading tokens of `prompt` need not be run."""
        whole = self.logits is not None and len(prompt) == len(self.tokens)
        if whole and np.array_equal(prompt, self.tokens):
            return len(prompt)
        return saving(prompt, self.tokens, cuttable)


class Start(NamedTuple):
    """Where a prompt is taken up: behind the first `length` tokens of a held prefix."""

    length: int
    held: Held | None

    @property
    def ssd(self) -> int:
        """How many of these tokens came from SSD."""
        return 0 if self.held is None else min(self.length, self.held.ssd)

    def load(self, slots: Any, row: int) -> None:
        """Put what is held into a row of `cycle.Slots`."""
        if self.held is not None and self.length:
            slots.arena.load(row, self.held.target.first(self.length))
            slots.draft.load(row, self.held.draft.first(self.length))


COLD = Start(0, None)


class Origin(NamedTuple):
    """Where the tokens of a prompt came from; what is left of them came from its neighbours."""

    computed: int
    ram: int  # from memory
    ssd: int
    made: float  # when what is in memory was made (time.perf_counter)
    miss: str | None  # why nothing on SSD served it
