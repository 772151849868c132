"""Which rows share a prefix, and how to cut rows into shards behind shared prefixes.

No tokenizer here: what is compared is the canonical text of a row. It is a hint that puts rows
together; the decoder finds the exact common tokens, so a wrong hint costs time, never a result.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_batch.worker.contract import JobSpec, PackedShard, Prompt, Shard
from dflash_batch.worker.cut import cut, shard_rows

BLOCK = 512
"""Bytes of canonical text to a block of the hash chain."""

_FIELD, _END = b"\x1f", b"\x1e"


def canonical(row: JobSpec) -> bytes:
    """The text of a row's prompt, such that rows with a common prompt prefix share its bytes."""
    if row.messages is not None:
        return b"c" + b"".join(_message(message) for message in row.messages)
    return b"".join(_prompt(prompt) for prompt in row.prompts or ())


def _message(message: dict[str, Any]) -> bytes:
    """Role, content, and whatever else it has, in that order."""
    content = message.get("content")
    if isinstance(content, str) and len(message) == 2 and "role" in message:
        return _bytes(f"{message['role']}\x1f{content}\x1f\x1e")
    if isinstance(content, list):
        text = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    else:
        text = content if isinstance(content, str) else ""
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    tail = _bytes(json.dumps(rest, sort_keys=True)) if rest else b""
    return _bytes(str(message.get("role", ""))) + _FIELD + _bytes(text) + _FIELD + tail + _END


def _prompt(prompt: Prompt) -> bytes:
    if isinstance(prompt, str):
        return b"t" + _bytes(prompt) + _END
    # Four bytes a token, so that a block border never falls inside one.
    return b"i" + b"".join(token.to_bytes(4, "little") for token in prompt) + _END


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def prefix_chain(row: JobSpec) -> list[bytes]:
    """Eight-byte hashes of the row's first 1, 2, … whole blocks; equal hash, equal prefix."""
    text = canonical(row)
    return _chain(text, len(text) // BLOCK)


def _chain(text: bytes, blocks: int) -> list[bytes]:
    chain: list[bytes] = []
    seen = b""
    for start in range(0, blocks * BLOCK, BLOCK):
        seen = hashlib.blake2b(seen + text[start : start + BLOCK], digest_size=8).digest()
        chain.append(seen)
    return chain


@dataclass(frozen=True)
class Piece:
    """The rows of one shard, in prefix order, and the hex of the prefix they share ("" if none)."""

    group: str
    rows: tuple[JobSpec, ...]


@dataclass(frozen=True)
class Plan:
    """How a batch is cut. The same rows give the same plan, which makes an upload repeatable."""

    pieces: tuple[Piece, ...]
    rows: int
    groups: int  # prefixes of at least one block that GROUP_ROWS or more rows share
    chars: int  # bytes of canonical text
    shared: int  # of these, bytes that a perfect prefix tree would not compute again

    @property
    def shared_share(self) -> float:
        """Share (0..1) of the prompt text that a perfect prefix tree saves."""
        return self.shared / self.chars if self.chars else 0.0

    def shards(self, batch_id: str) -> Iterator[Shard]:
        """The shards of the batch, in prefix order."""
        for number, piece in enumerate(self.pieces):
            yield Shard.model_construct(
                id=f"{batch_id}-{number}",
                batch_id=batch_id,
                group=piece.group,
                rows=list(piece.rows),
            )

    def packed(self, batch_id: str) -> Iterator[PackedShard]:
        """The same, as the queue stores them."""
        return (shard.packed() for shard in self.shards(batch_id))


def plan(rows: Iterable[JobSpec]) -> Plan:
    """Sort rows by prefix and cut them into shards that, where they can, hold one group each."""
    keyed = sorted(((canonical(row), row.index, row) for row in rows), key=lambda item: item[:2])
    texts = [text for text, _, _ in keyed]
    common = array("Q", [0][: len(texts)]) + array("Q", map(_common, texts, texts[1:]))
    ordered = [row for _, _, row in keyed]
    found = cut(_Texts(texts, common), shard_rows(len(ordered)))
    return Plan(
        pieces=tuple(
            Piece(part.group, tuple(ordered[at] for at in part.positions)) for part in found.parts
        ),
        rows=len(ordered),
        groups=found.groups,
        chars=sum(map(len, texts)),
        shared=sum(common),
    )


class _Texts:
    """Rows in the order of their texts, as `cut` wants to see them."""

    def __init__(self, texts: Sequence[bytes], common: Sequence[int]) -> None:
        self._texts = texts
        self.borders = array("I", (length // BLOCK for length in common))

    def name(self, at: int, depth: int) -> str:
        return _chain(self._texts[at], depth)[-1].hex()

    def depth_between(self, first: int, last: int) -> int:
        # what these share, those between share too
        return _common(self._texts[first], self._texts[last]) // BLOCK


def _common(first: bytes, second: bytes) -> int:
    """Length of the common prefix: whole slices are compared, never single bytes."""
    longest = min(len(first), len(second))
    low, high = 0, 32
    while high < longest and first[low:high] == second[low:high]:
        low, high = high, 2 * high
    high = min(high, longest)
    if first[low:high] == second[low:high]:
        return high
    while high - low > 1:  # first[:low] is common, first[:high] is not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
