"""The target's own texts: prompts, replies, and the file they are collected in.

A text is a prompt's token ids and a reply's. The file is JSON lines, appended to as replies end, so
a run that was killed goes on where it stopped; a last line that was cut off is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import PromptError

LOOP = 8
"""Length of a repeated piece of text that counts as a loop,"""
LOOPS = 4
"""and how often it must have come."""


class Prompt(NamedTuple):
    """A prompt in tokens, ready for the answer."""

    name: int  # its number in the file of prompts
    tokens: list[int]
    kind: str | None  # what the user calls this sort of prompt
    max_tokens: int | None  # of its reply


class Text(NamedTuple):
    """A reply of the target's, and what it was a reply to."""

    name: int  # of the prompt
    sample: int  # 0: the greedy reply; others were drawn
    prompt: list[int]
    reply: list[int]  # the stop token included, if it ended by itself
    kind: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.reply)


@dataclass(frozen=True)
class PromptFile:
    """A file of prompts: one JSON object a line, `messages` or `prompt` (text or token ids).

    `kind` and `max_tokens` may stand beside them.
    """

    path: Path

    @property
    def digest(self) -> str:
        """sha256 of the bytes, hex."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def read(self, decoder: Decoder, longest: int) -> tuple[list[Prompt], Counter[str]]:
        """The prompts in tokens, and why others were left out.

        `longest` is the most tokens a prompt may have. Raises PromptError, with the line number,
        when a line is no prompt at all.
        """
        prompts: list[Prompt] = []
        refused: Counter[str] = Counter()
        with self.path.open(encoding="utf-8") as lines:
            for name, line in enumerate(lines):
                try:
                    entry = json.loads(line)
                    tokens = _encoded(decoder, entry)
                    decoder.room(tokens, None)
                except (PromptError, ValueError, TypeError, KeyError) as e:
                    raise PromptError(f"{self.path.name}, line {name + 1}: {e}") from e
                if len(tokens) > longest:
                    refused[f"longer than {longest:,} tokens"] += 1
                    continue
                prompts.append(Prompt(name, tokens, entry.get("kind"), entry.get("max_tokens")))
        if not prompts:
            raise PromptError(f"{self.path.name}: no prompt can be used ({dict(refused)})")
        return prompts, refused


def _encoded(decoder: Decoder, entry: dict[str, Any]) -> list[int]:
    if "messages" in entry:
        return decoder.encode_chat(entry["messages"])
    prompt = entry["prompt"]
    return decoder.encode_text(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]


class TextFile:
    """The texts so far, in `path` (mode 0600)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: list[Text] = []
        if path.exists():
            self._read()

    @property
    def done(self) -> set[tuple[int, int]]:
        """Prompt and sample of each text."""
        return {(text.name, text.sample) for text in self.texts}

    def add(self, texts: Iterable[Text]) -> None:
        """Append texts, and see them safely to the disk."""
        fresh = list(texts)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(text._asdict()) + "\n" for text in fresh)
            file.flush()
            os.fsync(file.fileno())
        self.texts += fresh

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # killed while it wrote
            os.truncate(self.path, whole)
        self.texts = [Text(**json.loads(line)) for line in data[:whole].splitlines()]


def without_loop(reply: list[int]) -> list[int]:
    """A reply that ran into its limit, cut where a piece of LOOP tokens comes the LOOPS-th time."""
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(LOOP, len(reply) + 1):
        piece = tuple(reply[end - LOOP : end])
        seen[piece] += 1
        if seen[piece] == LOOPS:
            return reply[:end]
    return reply
