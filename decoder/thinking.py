"""Thinking models: where in a row's tokens the thinking ends and the answer begins.

    tokens    ␣ [start] t t t t t t t [end] ␣ a a a a
    place     before    inside               after

Markers are told by their token ids. A block counts only at the beginning of an output, behind
blanks at most, or where the prompt ends inside one: an answer may well write about markers.
How a block is closed when its budget is spent is in force.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from dflash_batch.decoder.text import Decodes
from dflash_batch.decoder.types import Thinking

Tokenizer = Any
"""mlx-lm's TokenizerWrapper: `think_start_tokens`, `think_end_tokens`, `decode`."""


def thinking_of(
    tokenizer: Tokenizer, prompt: Sequence[int], *, continued: bool = False
) -> Thinking | None:
    """The thinking block of a chat whose rendered prompt this is; None: the model has none.

    A prompt that ends in a start marker and blanks ends inside the block. One whose last message is
    to be `continued` may have text there; elsewhere such text is what somebody wrote.
    """
    if not tokenizer.has_thinking:
        return None
    start, end = tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens)
    at = _last(prompt, start)
    inside = at >= 0 and at > _last(prompt, end)
    behind = list(prompt[at + len(start) :])
    return Thinking(start, end, open=inside and (continued or not tokenizer.decode(behind).strip()))


def _last(tokens: Sequence[int], marker: tuple[int, ...]) -> int:
    """Where `marker` begins for the last time, or -1."""
    for at in range(len(tokens) - len(marker), -1, -1):
        if tokens[at] == marker[0] and tuple(tokens[at : at + len(marker)]) == marker:
            return at
    return -1


class Place(Enum):
    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


class Thoughts:
    """Follows the output of one row through its thinking block."""

    def __init__(self, block: Thinking, tokenizer: Decodes) -> None:
        self.block = block
        self.place = Place.INSIDE if block.open else Place.BEFORE
        self.begin = 0  # where the thoughts begin in the output
        self.end = 0  # and where they end, once they have
        self.answer = 0  # where the answer begins, once it has
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._blanks = 0  # tokens before what may become the start marker

    @property
    def opened(self) -> bool:
        """Whether there is a block."""
        return self.place is Place.INSIDE or self.answer > 0

    def push(self, token: int) -> Sequence[int]:
        """Take one more token; return those now known to be of the answer."""
        self._tokens.append(token)
        if self.place is Place.AFTER:
            return (token,)
        if self.place is Place.INSIDE:
            if self._ends_with(self.block.end):
                self.place = Place.AFTER
                self.answer = len(self._tokens)
                self.end = self.answer - len(self.block.end)
            return ()
        start = self.block.start
        at_start = len(self._tokens) == self._blanks + 1 and token != start[0]
        if at_start and not self._tokenizer.decode([token]).strip():
            self._blanks += 1
            return ()
        head = tuple(self._tokens[self._blanks :])
        if head == start:
            self.place = Place.INSIDE
            self.begin = len(self._tokens)
        elif head != start[: len(head)]:
            self.place = Place.AFTER
            return tuple(self._tokens)
        return ()

    def _ends_with(self, marker: tuple[int, ...]) -> bool:
        spoken = len(self._tokens) - self.begin
        return spoken >= len(marker) and tuple(self._tokens[-len(marker) :]) == marker

    # The budget

    @property
    def reach(self) -> int | None:
        """How long the output can be before the budget may be spent; None: it cannot be.

        Before the block the start marker could be next, and the whole budget behind it.
        """
        if self.block.budget is None or self.place is Place.AFTER:
            return None
        if self.place is Place.BEFORE:
            return self._blanks + len(self.block.start) + self.block.budget
        return self.begin + self.block.budget

    @property
    def missing(self) -> tuple[int, ...]:
        """What closes the block now that its budget is spent; () while it is not."""
        if self.place is not Place.INSIDE or self.reach is None or len(self._tokens) < self.reach:
            return ()
        end, spoken = self.block.end, tuple(self._tokens[self.begin :])
        begun = next(n for n in range(len(end) - 1, -1, -1) if spoken[len(spoken) - n :] == end[:n])
        return end[begun:]
