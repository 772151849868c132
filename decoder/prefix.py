"""The prefix the rows at hand share: prefilled once, then copied into each row.

One prefix is held at a time, with the target's and the drafter's state behind it. Pure attention
can be cut to any length, so a row takes as much of the held prefix as its own prompt agrees with;
of a recurrent state it takes all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_batch.decoder.arena import RowSnapshot

Tokens = npt.NDArray[np.int32]

WORTH = 16
"""Fewest tokens for which a prefix is held or a group is split: below, a forward costs more."""


def common(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if len(differs) else n


def usable(prompt: Tokens, other: Tokens) -> int:
    """How much of `prompt` can come from `other`: its last token is always run, for its logits."""
    return min(common(prompt, other), len(prompt) - 1)


def best_shared(prompt: Tokens, others: Iterable[Tokens]) -> int:
    """The longest prefix `prompt` shares with any of `others`."""
    return max((usable(prompt, other) for other in others), default=0)


def saving(prompt: Tokens, held: Tokens, cuttable: bool) -> int:
    """How much of `prompt` a state after `held` can stand for."""
    n = usable(prompt, held)
    return n if cuttable or n == len(held) else 0


@dataclass(frozen=True)
class Held:
    """A prefilled prefix."""

    tokens: Tokens
    target: RowSnapshot
    draft: Any  # the drafter's snapshot

    def match(self, prompt: Tokens) -> int:
        """How many tokens of `prompt` it saves."""
        n = saving(prompt, self.tokens, self.target.cuttable)
        return n if n >= WORTH else 0
