"""A row on the host: what it asked for, what it has said so far, and what that took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dflash_batch.decoder.logprobs import Shown
from dflash_batch.decoder.prefix import Origin, Tokens
from dflash_batch.decoder.text import Decodes, StopStrings, cut
from dflash_batch.decoder.thinking import Thoughts
from dflash_batch.decoder.types import Fault, FinishReason, Request

Logprob = tuple[float, list[tuple[int, float]]]
"""Log p of a token, and the likely tokens at its place with theirs."""


class Words(NamedTuple):
    """What a row has said, as text."""

    text: str  # the answer, without stop token and stop string
    reasoning: str | None  # None: there was no thinking block
    reasoning_tokens: int  # tokens before the answer, markers included


@dataclass(slots=True, eq=False)
class Row:
    """One request from its admission to its end."""

    request: Request
    prompt: Tokens
    added: float
    stops: frozenset[int]
    watch: StopStrings | None
    tail: list[int] = field(default_factory=list)  # of the prompt, still to ride in cycles
    thoughts: Thoughts | None = None
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    fault: Fault | None = None
    reach: int = 0  # tokens that the device may emit before the host has looked
    cancelled: bool = False
    computed: int = 0  # prompt tokens run for it
    ram: int = 0  # prompt tokens that were in memory before it came
    ssd: int = 0  # prompt tokens read from SSD, whether by it or by a neighbour
    miss: str | None = None
    started: float = 0.0
    first: float = 0.0
    width: int = 1
    cycles: int = 0
    plain: int = 0  # cycles without a draft
    drafted: int = 0
    accepted: int = 0
    emitted_per_cycle: list[int] = field(default_factory=list)
    drafted_per_cycle: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.cancelled or self.reason is not None or self.fault is not None

    @property
    def left(self) -> int:
        return self.request.max_tokens - len(self.tokens)

    @property
    def committed(self) -> int:
        """Tokens in the cache once all that was launched is done: all but the anchor."""
        return len(self.prompt) - len(self.tail) + max(len(self.tokens) - 1, 0)

    @property
    def reachable(self) -> int:
        """What `reach` is to be: the budget of tokens, or where the thinking may be at its end."""
        thinking = self.thoughts.reach if self.thoughts is not None else None
        most = self.request.max_tokens
        return most if thinking is None else min(most, thinking)

    def came(self, origin: Origin) -> None:
        """Note where its prompt came from. What was held after it came is its neighbours'."""
        self.computed, self.ssd, self.miss = origin.computed, origin.ssd, origin.miss
        self.ram = origin.ram if origin.made < self.added else 0

    def take(self, tokens: Sequence[int]) -> int:
        """Emit tokens up to and including the one that ends the row; return how many."""
        for n, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if self._hears_a_stop(token) or token in self.stops:
                self.reason = "stop"
            elif self.left <= 0:
                self.reason = "length"
            if self.reason is not None:
                return n
        return len(tokens)

    def _hears_a_stop(self, token: int) -> bool:
        """Whether the newest token completes a stop string of the answer."""
        thoughts = self.thoughts
        answer = (token,) if thoughts is None else thoughts.push(token)
        if self.watch is None:
            return False
        if thoughts is not None and thoughts.answer == len(self.tokens):
            self.watch.skip_blanks()
        first = len(self.tokens) - len(answer)
        early = max(0, self.request.min_tokens - first)
        return any([self.watch.push(token) for token in answer[early:]])

    def words(self, tokenizer: Decodes, *, skip_special: bool) -> Words:
        """The row's tokens as text, decoded whole: pieces joined can differ at their seams."""
        request, thoughts = self.request, self.thoughts
        ends = bool(self.tokens) and self.tokens[-1] in self.stops
        tokens = self.tokens[:-1] if ends else self.tokens

        def text(ids: Sequence[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=skip_special)

        if thoughts is None or not thoughts.opened:
            early = text(tokens[: request.min_tokens])
            return Words(cut(text(tokens), request.stop, len(early)), None, 0)
        if not thoughts.answer:
            return Words("", text(tokens[thoughts.begin :]).strip(), len(self.tokens))
        answer = tokens[thoughts.answer :]
        early = text(answer[: max(0, request.min_tokens - thoughts.answer)]).lstrip()
        return Words(
            cut(text(answer).lstrip(), request.stop, len(early)),
            text(tokens[thoughts.begin : thoughts.end]).strip(),
            thoughts.answer,
        )

    def show(self, shown: Shown, slot: int, first: int, count: int) -> None:
        """Note the log probabilities of the `count` tokens just taken, if they are wanted."""
        if self.request.logprobs is not None:
            self.logprobs += _listed(shown, slot, first, count, self.request.logprobs)

    def show_prompt(self, parts: Sequence[Shown]) -> None:
        """Note those of the prompt's tokens, the first left out. One NaN, and the row has failed.

        `parts` follow each other and are of this row alone.
        """
        most = self.request.logprobs
        assert most is not None
        for shown in parts:
            self.prompt_logprobs += _listed(shown, 0, 0, shown.chosen.shape[1], most)
        if any(math.isnan(own) for own, _ in self.prompt_logprobs):
            self.fail()

    def fail(self) -> None:
        """The target's logits are no numbers: nothing can be chosen by them."""
        self.fault = Fault("numerical_error", "the model's logits are NaN or infinite in this row")


def _listed(shown: Shown, row: int, first: int, count: int, most: int) -> list[Logprob]:
    """Log probabilities of `count` tokens of one row, with `most` alternatives each."""
    listed = []
    arrays = (np.array(a[row, first : first + count]) for a in shown)
    for own, others, logs in zip(*arrays, strict=True):
        top = list(zip(others.tolist(), logs.tolist(), strict=True))
        listed.append((float(own), top[:most]))
    return listed
