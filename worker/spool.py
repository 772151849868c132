"""Rows of a batch on disk, for inputs that are not to sit in memory.

A row's JSON goes to a file that has no name and vanishes with us; in memory stay its place in that
file and a sketch of its prefix, sixteen bytes or a few more. Sorting the sketches puts rows with a
common prefix together, to the nearest border:

    canonical text   |--64--|--64--|----128----|--------256--------|------ 512 ------|-- … --|
    sketch              4 B    4 B      4 B             4 B                 4 B
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, overload

from dflash_batch.worker.contract import JobSpec, PackedShard, compressed
from dflash_batch.worker.cut import Cut, cut, shard_rows
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.prefix import BLOCK, canonical

_FINE = (64, 128, 256)  # borders within the first block
_WORD = 4


class SpoolFailed(UserError):
    """Raised when the disk does not take the rows."""

    code = "spool_failed"


def sketch(text: bytes) -> bytes:
    """Four bytes for each border of the text: equal words at the front, equal text up to there.

    Each is the CRC of all before the border, so two texts that differ may look alike once in four
    billion cases; the rows then stand together for nothing, and no result depends on it.
    """
    words = array("I")
    seen = start = 0
    for border in (*_FINE, *range(BLOCK, len(text) + 1, BLOCK)):
        if border > len(text):
            break
        seen = zlib.crc32(text[start:border], seen)
        words.append(seen)
        start = border
    return words.tobytes()


class Spool(Sequence[JobSpec]):
    """Rows in the order of their lines, to be appended once and read back in any order."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the file is made; None: the system's place for temporary files."""
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise _failed(error) from error
        self._starts = array("Q")
        self._sizes = array("I")
        self._sketches: list[bytes] = []
        self._end = 0
        self._chars = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # and the rows are gone

    def append(self, row: JobSpec) -> None:
        """Raises SpoolFailed."""
        text = row.model_dump_json(exclude_none=True, exclude_defaults=True).encode()
        prompt = canonical(row)
        try:
            self._file.write(text)
        except OSError as error:
            raise _failed(error) from error
        self._starts.append(self._end)
        self._sizes.append(len(text))
        self._end += len(text)
        self._chars += len(prompt)
        self._sketches.append(sketch(prompt))

    def keep(self, indices: Iterable[int]) -> None:
        """Leave only these rows, numbered anew in their order."""
        kept = list(indices)
        self._starts = array("Q", (self._starts[at] for at in kept))
        self._sizes = array("I", (self._sizes[at] for at in kept))
        self._sketches = [self._sketches[at] for at in kept]

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, at: int) -> JobSpec: ...
    @overload
    def __getitem__(self, at: slice) -> list[JobSpec]: ...
    def __getitem__(self, at: int | slice) -> JobSpec | list[JobSpec]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        self._file.flush()
        return JobSpec.parse(self.text(at % len(self)))

    def text(self, at: int) -> bytes:
        """The JSON of a row, with its index as it is now. The file must have been flushed."""
        text = os.pread(self._file.fileno(), self._sizes[at], self._starts[at])
        return b'{"index":%d' % at + text[text.index(b",") :]

    def plan(self) -> SpoolPlan:
        """Sort the rows by sketch and cut them into shards. Raises SpoolFailed."""
        try:
            self._file.flush()
        except OSError as error:
            raise _failed(error) from error
        order = array("I", sorted(range(len(self)), key=self._sketches.__getitem__))
        sketches = _Sketches(self._sketches, order)
        found = cut(sketches, shard_rows(len(self)))
        return SpoolPlan(self, order, found, self._chars, sketches.shared)


class SpoolPlan:
    """How the rows of a spool are cut. The same rows give the same plan."""

    def __init__(self, spool: Spool, order: array[int], found: Cut, chars: int, shared: int):
        self._spool = spool
        self._order = order
        self._cut = found
        self.rows = len(order)
        self.groups = found.groups
        self.shared_share = shared / chars if chars else 0.0
        """Share (0..1) of the prompt text that a prefix tree saves, at least."""

    def packed(self, batch_id: str) -> Iterator[PackedShard]:
        """The shards of the batch, in prefix order."""
        for number, part in enumerate(self._cut.parts):
            texts = [self._spool.text(self._order[at]) for at in part.positions]
            payload = compressed(b"[" + b",".join(texts) + b"]")
            yield PackedShard(f"{batch_id}-{number}", batch_id, part.group, len(texts), payload)


class _Sketches:
    """Rows in the order of their sketches, as `cut` wants to see them."""

    def __init__(self, sketches: Sequence[bytes], order: array[int]) -> None:
        self._sketches = sketches
        self._order = order
        self.borders = array("I", bytes(_WORD * len(order)))
        self.shared = 0  # bytes, at least
        before = b""
        for at, row in enumerate(order):
            words = _common_words(before, sketches[row])
            self.borders[at] = max(0, words - len(_FINE))
            self.shared += _bytes_of(words)
            before = sketches[row]

    def name(self, at: int, depth: int) -> str:
        words = self._sketches[self._order[at]][: _WORD * (len(_FINE) + depth)]
        return hashlib.blake2b(words, digest_size=8).hexdigest()

    def depth_between(self, first: int, last: int) -> int:
        one, other = (self._sketches[self._order[at]] for at in (first, last))
        return max(0, _common_words(one, other) - len(_FINE))


def _common_words(one: bytes, other: bytes) -> int:
    """Words at the front that two sketches share."""
    if one[:_WORD] != other[:_WORD]:
        return 0
    longest = min(len(one), len(other)) // _WORD
    count = 0
    while count < longest and (
        one[count * _WORD : (count + 1) * _WORD] == other[count * _WORD : (count + 1) * _WORD]
    ):
        count += 1
    return count


def _bytes_of(words: int) -> int:
    """The border up to which texts agree that share so many words."""
    if not words:
        return 0
    return _FINE[words - 1] if words <= len(_FINE) else (words - len(_FINE)) * BLOCK


def _failed(error: OSError) -> SpoolFailed:
    return SpoolFailed(
        f"no room for the rows in {tempfile.gettempdir()}: {error.strerror or error}. "
        "TMPDIR names another place."
    )
