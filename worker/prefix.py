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

from dflash_batch.worker.contract import SHARD_ROWS, JobSpec, Prompt, Shard

BLOCK = 512
"""Bytes of canonical text to a block of the hash chain."""

GROUP_ROWS = 4
"""Fewest rows that make a shared prefix a group."""

SMALLEST_SHARD = 8
"""Fewest rows to a shard, where the batch has them."""

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


def shard_rows(rows: int) -> int:
    """Most rows to a shard: a quarter of a small batch, so that a second worker finds some.

    It depends on the batch alone, since an upload that goes on after a crash must cut the same.
    """
    return min(SHARD_ROWS, max(SMALLEST_SHARD, -(-rows // 4)))


def plan(rows: Iterable[JobSpec]) -> Plan:
    """Sort rows by prefix and cut them into shards that, where they can, hold one group each.

    The group of a row is the deepest run of whole blocks that it shares with at least
    GROUP_ROWS - 1 others. A group of half a shard or more is cut by itself, evenly; smaller ones
    and single rows are packed together in prefix order.
    """
    keyed = sorted(((canonical(row), row.index, row) for row in rows), key=lambda item: item[:2])
    texts = [text for text, _, _ in keyed]
    common = array("Q", [0]) + array("Q", map(_common, texts, texts[1:]))
    ordered = [row for _, _, row in keyed]
    limit = shard_rows(len(ordered))
    groups = _groups(texts, common)
    large = {name for name, members in groups.items() if name and 2 * len(members) >= limit}
    parts = [(name, part) for name in large for part in _even(groups[name], limit)]
    parts += [(_label(texts, part), part) for part in _packed(_runs(groups, large), limit)]
    parts.sort(key=lambda named: named[1][0])
    return Plan(
        pieces=tuple(Piece(name, tuple(ordered[at] for at in part)) for name, part in parts),
        rows=len(ordered),
        groups=sum(1 for group in groups if group),
        chars=sum(map(len, texts)),
        shared=sum(common),
    )


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


def _groups(texts: Sequence[bytes], common: Sequence[int]) -> dict[str, list[int]]:
    """Positions (in sorted order) by group; "" holds the rows without one.

    Sorted rows that share a prefix are neighbours, so a prefix shared by GROUP_ROWS rows is the
    least of GROUP_ROWS - 1 borders in succession, and a row has the best of its windows.
    """
    borders = [length // BLOCK for length in common]
    blocks = [0] * len(texts)
    windows = zip(*(borders[ahead:] for ahead in range(1, GROUP_ROWS)), strict=False)
    for start, window in enumerate(windows):
        if all(window):
            depth = min(window)
            for at in range(start, start + GROUP_ROWS):
                blocks[at] = max(blocks[at], depth)
    groups: dict[str, list[int]] = {}
    name = ""
    for at, depth in enumerate(blocks):
        # The name before holds on while the depth does and the border is that deep.
        if not (at and depth == blocks[at - 1] and borders[at] >= depth):
            name = _chain(texts[at], depth)[-1].hex() if depth else ""
        groups.setdefault(name, []).append(at)
    return groups


def _even(members: Sequence[int], limit: int) -> Iterator[list[int]]:
    """`members` in as few parts of at most `limit` as it takes, all of nearly one size."""
    parts = -(-len(members) // limit)
    for part in range(parts):
        yield list(members[len(members) * part // parts : len(members) * (part + 1) // parts])


def _runs(groups: dict[str, list[int]], large: set[str]) -> list[list[int]]:
    """What is to be packed: small groups whole, other rows one by one; in prefix order."""
    runs = [[at] for at in groups.get("", ())]
    runs += [members for name, members in groups.items() if name and name not in large]
    return sorted(runs)


def _packed(runs: Iterable[list[int]], limit: int) -> Iterator[list[int]]:
    """Fill parts up to `limit` without cutting a run; a run is less than half of one."""
    part: list[int] = []
    for run in runs:
        if part and len(part) + len(run) > limit:
            yield part
            part = []
        part += run
    if part:
        yield part


def _label(texts: Sequence[bytes], part: Sequence[int]) -> str:
    """The blocks that all rows of a packed part share, as a group name."""
    first, last = texts[min(part)], texts[max(part)]  # what these share, those between share too
    chain = _chain(first, _common(first, last) // BLOCK)
    return chain[-1].hex() if chain else ""
