"""Packs encoded question-and-answer turns into rows of conversation. NumPy only, seeded.

A row is a chat: perhaps a system message, then turns until the row is full. So one row trains both
the zero-shot case (its first turn) and the few-shot case (its later turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dflash_batch.decoder.demo.problems import SYSTEM, Problem
from dflash_batch.decoder.training.tokenizer import END, START, chat_text

Tokens = NDArray[np.int32]

OTHER_SYSTEMS = (
    "You are a helpful assistant.",
    "Answer the question.",
    "You are good at arithmetic. Think step by step.",
)


class Turn(NamedTuple):
    """One exchange in tokens.

    ``asked`` ends with the assistant's header, ``reply`` with the end mark.
    """

    asked: Tokens
    reply: Tokens


class Rows(NamedTuple):
    """Packed rows: ``tokens`` int32 [N, T] and ``supervised`` bool [N, T], true on reply tokens."""

    tokens: Tokens
    supervised: NDArray[np.bool_]


def encode_turns(tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[Turn]:
    """The problems as turns of a chat."""
    asked = [chat_text("user", p.question) + f"{START}assistant\n" for p in problems]
    replies = [p.reply + END for p in problems]
    return [
        Turn(np.array(question, np.int32), np.array(reply, np.int32))
        for question, reply in zip(
            _encode(tokenizer, asked), _encode(tokenizer, replies), strict=True
        )
    ]


def encode_systems(tokenizer: Tokenizer) -> list[Tokens]:
    """What a row may begin with: nothing, the demo's system message, or another one."""
    texts = ["", "", chat_text("system", SYSTEM), *(chat_text("system", s) for s in OTHER_SYSTEMS)]
    return [np.array(ids, np.int32) for ids in _encode(tokenizer, texts)]


class Packer:
    """Draws rows of chat from a pool of turns, for ever and reproducibly."""

    def __init__(
        self, turns: Sequence[Turn], systems: Sequence[Tokens], newline: Tokens, seed: int
    ) -> None:
        self._turns = turns
        self._systems = systems
        self._newline = newline
        self._rng = np.random.default_rng(seed)

    def rows(self, count: int, length: int) -> Rows:
        """``count`` rows cut at ``length`` tokens."""
        tokens = np.zeros((count, length), np.int32)
        supervised = np.zeros((count, length), np.bool_)
        for row in range(count):
            pieces, marks = self._chat(length)
            tokens[row] = np.concatenate(pieces)[:length]
            supervised[row] = np.concatenate(marks)[:length]
        return Rows(tokens, supervised)

    def _chat(self, length: int) -> tuple[list[Tokens], list[NDArray[np.bool_]]]:
        system = self._systems[int(self._rng.integers(len(self._systems)))]
        pieces, marks, filled = [system], [np.zeros(len(system), np.bool_)], len(system)
        while filled < length:
            turn = self._turns[int(self._rng.integers(len(self._turns)))]
            for piece, mark in ((turn.asked, False), (turn.reply, True), (self._newline, False)):
                pieces.append(piece)
                marks.append(np.full(len(piece), mark, np.bool_))
                filled += len(piece)
        return pieces, marks


def pad_turns(turns: Sequence[Turn], length: int, before: Tokens | None = None) -> Rows:
    """One turn per row behind an optional common prefix, padded with zeros on the right.

    Turns that do not fit are an error of the caller.
    """
    prefix = np.zeros(0, np.int32) if before is None else before
    tokens = np.zeros((len(turns), length), np.int32)
    supervised = np.zeros((len(turns), length), np.bool_)
    for row, turn in enumerate(turns):
        start = len(prefix) + len(turn.asked)
        stop = start + len(turn.reply)
        assert stop <= length, f"turn of {stop} tokens does not fit in {length}"
        tokens[row, :stop] = np.concatenate((prefix, turn.asked, turn.reply))
        supervised[row, start:stop] = True
    return Rows(tokens, supervised)


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]
