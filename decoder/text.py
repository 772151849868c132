"""Tokens to text: a detokeniser that is safe to read at any time, and stop strings.

Stop strings are looked for in the text, not in tokens, so they are found across token and block
borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """The part of a tokenizer that this file needs."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of token ids."""
        ...


class Detokenizer:
    """Text of a growing list of tokens, read piece by piece.

    A piece is held back while it ends inside a character (U+FFFD), so that pieces joined equal
    the whole. Each piece is decoded with a few tokens before it, since tokenizers treat the first
    token of a text differently:

        ids     … a a a | b b b | c c
                  ^start  ^read         text(start…) minus text(start…read) is the new piece
    """

    def __init__(self, tokenizer: Decodes, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._start = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Take one more token; return the text that is certain now, often ""."""
        self._ids.append(token)
        before = self._text(self._ids[self._start : self._read])
        after = self._text(self._ids[self._start :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(list(ids), skip_special_tokens=self._skip_special)


class StopStrings:
    """Watches the text of one row for stop strings."""

    def __init__(
        self, tokenizer: Decodes, stops: Sequence[str], *, skip_special: bool = True
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._tail = ""
        self._blanks_count = True

    def skip_blanks(self) -> None:
        """What is blank before the first word is not text: it only parts it from the thinking."""
        self._blanks_count = False

    def push(self, token: int) -> bool:
        """Take one more token; True when a stop string is complete."""
        piece = self._detokenizer.push(token)
        if not self._blanks_count:
            piece = piece.lstrip()
            self._blanks_count = bool(piece)
        if not piece:
            return False
        text = self._tail + piece
        # Only what could be the beginning of a stop string needs to be remembered.
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return any(stop in text for stop in self._stops)


def cut(text: str, stops: Sequence[str], start: int = 0) -> str:
    """`text` up to the stop string that begins first at or after `start`, without it."""
    found = [at for at in (text.find(stop, start) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text
