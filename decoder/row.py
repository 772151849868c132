"""A row on the host: what it asked for, what it has said so far, and what that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_batch.decoder.logprobs import Shown
from dflash_batch.decoder.prefix import Tokens
from dflash_batch.decoder.text import StopStrings
from dflash_batch.decoder.types import FinishReason, Request


@dataclass(slots=True, eq=False)
class Row:
    """One request from its admission to its end."""

    request: Request
    prompt: Tokens
    added: float
    stops: frozenset[int]
    watch: StopStrings | None
    tail: list[int] = field(default_factory=list)  # of the prompt, still to ride in cycles
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    cancelled: bool = False
    computed: int = 0
    started: float = 0.0
    first: float = 0.0
    width: int = 1
    cycles: int = 0
    plain: int = 0  # cycles without a draft
    drafted: int = 0
    accepted: int = 0
    emitted_per_cycle: list[int] = field(default_factory=list)
    drafted_per_cycle: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.cancelled or self.reason is not None

    @property
    def left(self) -> int:
        return self.request.max_tokens - len(self.tokens)

    @property
    def committed(self) -> int:
        """Tokens in the cache once all that was launched is done: all but the anchor."""
        return len(self.prompt) - len(self.tail) + max(len(self.tokens) - 1, 0)

    def take(self, tokens: Sequence[int]) -> int:
        """Emit tokens up to and including the one that ends the row; return how many."""
        for n, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self.stops or (self.watch is not None and self.watch.push(token)):
                self.reason = "stop"
            elif self.left <= 0:
                self.reason = "length"
            if self.reason is not None:
                return n
        return len(tokens)

    def show(self, shown: Shown, slot: int, first: int, count: int) -> None:
        """Note the log probabilities of the `count` tokens just taken, if they are wanted."""
        if self.request.logprobs is None:
            return
        chosen, ids, values = (np.array(a[slot, first : first + count]) for a in shown)
        for own, others, logs in zip(chosen, ids, values, strict=True):
            top = list(zip(others.tolist(), logs.tolist(), strict=True))
            self.logprobs.append((float(own), top[: self.request.logprobs]))
