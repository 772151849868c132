"""The prefix the rows at hand share: prefilled once, then copied into each row.

A prefix is held with the target's and the drafter's state behind it. Pure attention can be cut to
any length, so one is held at a time, and a row takes as much of it as its own prompt agrees with.
A recurrent state is taken whole or not at all, so there each branch point on the way is held:

    system prompt ─┬─ question 1 ─┬─ …        held for the first row: the system prompt, and
                   │              └─ …        question 1 behind it
                   └─ question 2 ─── …        takes the system prompt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_batch.decoder.arena import RowSnapshot

Tokens = npt.NDArray[np.int32]

WORTH = 16
"""Fewest tokens for which a prefix is held or a group is split: below, a forward costs more."""


MOST_HELD = 4
"""Most prefixes held at a time, each with the whole state of a row."""


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


def branches(prompt: Tokens, others: Iterable[Tokens]) -> list[int]:
    """Where `others` leave `prompt`: at the longest, and where most of them do."""
    counts = Counter(n for other in others if (n := usable(prompt, other)) >= WORTH)
    found = [max(counts)] if counts else []
    for n, _ in counts.most_common():
        if len(found) < MOST_HELD and all(abs(n - m) >= WORTH for m in found):
            found.append(n)
    return sorted(found)


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
