"""The store: prefixes on SSD within their bounds, shared by the processes of one machine.

    FOLDER/prefixes-1/   index/              diskcache: entry by key, use, counters
                         blobs/KEY           published: whole, on disk, checked
                         blobs/KEY.part      being written; anybody's once the lock is free
                         aside/KEY           was not what the index says; kept for a look
                         lock                held while files come and go

A blob is written under another name, fsynced, read back and checked, renamed, and only then
entered in the index. Whatever dies in between leaves an orphan, which the next one to open the
store removes. Readers take no lock: a file that is removed under them stays readable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash_batch.decoder.store import blob
from dflash_batch.decoder.store.errors import BadBlob
from dflash_batch.decoder.store.files import Files, locked, own_folder
from dflash_batch.decoder.store.index import Entry, Index, Tokens, Use, key_of

LAYOUT = "prefixes-1"
"""Name of the folder, with the version of what is in it."""

MOST_ASIDE = 4
"""Blobs set aside that are kept."""

GiB = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Bounds of the store, in bytes."""

    cap: int = 50 * GiB  # of all blobs
    floor: int = 10 * GiB  # left free in the file system
    daily: int = 100 * GiB  # written in one day, to spare the SSD


class Put(StrEnum):
    """What became of a prefix that was to be stored."""

    WRITTEN = "written"
    PRESENT = "present"
    TOO_LARGE = "too_large"  # for the cap, beside what is pinned
    NO_ROOM = "no_room"  # above the floor of free space
    BUDGET = "budget"  # today's writes are used up


class Stored(NamedTuple):
    """A prefix read back."""

    tensors: dict[str, blob.Tensor]
    facts: dict[str, str]
    size: int
    seconds: float  # reading and checking


class Store:
    """Prefixes by key. Methods raise CACHE_ERRORS and StoreError; none is meant for a row."""

    def __init__(self, folder: Path, limits: Limits | None = None, files: Files | None = None):
        """Open or make the store in `folder`, and bring it within `limits`.

        Raises StoreUnusable.
        """
        self.limits = limits or Limits()
        self.folder = own_folder(folder.expanduser().absolute() / LAYOUT)
        self._files = files or Files()
        self._blobs = own_folder(self.folder / "blobs")
        self._aside = own_folder(self.folder / "aside")
        self._looking, self._changing = threading.Lock(), threading.Lock()  # among our threads
        self._known: dict[str, Entry] = {}
        self._generation = -1
        self.index = Index(own_folder(self.folder / "index"))

    def close(self) -> None:
        self.index.close()

    # Looking

    def entries(self) -> dict[str, Entry]:
        """All entries, as of now."""
        with self._looking:
            generation = self.index.generation
            if generation != self._generation:
                self._known, self._generation = self.index.entries(), generation
            return self._known

    def uses(self) -> dict[str, Use]:
        return {key: self.index.use(key) for key in self.entries()}

    # Reading

    def get(self, key: str) -> Stored | None:
        """The blob of an entry, verified; None, and the entry is gone, when it is not sound."""
        entry = self.entries().get(key)
        if entry is None:
            return None
        try:
            stored = self._read(self._blobs / key, entry)
        except BadBlob as error:
            self._set_aside(key, error)
            return None
        self.index.touch(key)
        return stored

    def _read(self, path: Path, entry: Entry) -> Stored:
        begun = time.perf_counter()
        try:
            file = self._files.open(path)
        except FileNotFoundError as error:
            raise BadBlob("it is missing") from error
        with file:
            head = blob.read_head(file, entry.digest)
            tensors = blob.read_all(file, head)
        tokens = tensors.pop("tokens").data.view("<i4")
        if not np.array_equal(tokens, entry.tokens) or head.facts["fingerprint"] != (
            entry.fingerprint
        ):
            raise BadBlob("it holds another prefix")
        return Stored(tensors, head.facts, entry.size, time.perf_counter() - begun)

    def _set_aside(self, key: str, why: BadBlob) -> None:
        """What is not sound is a miss, now and later."""
        self.index.drop(key)
        self.index.count("set_aside")
        self.index.remember("last_set_aside", f"{key}: {why}")
        with suppress(FileNotFoundError):
            (self._blobs / key).replace(self._aside / key)

    # Writing

    def put(
        self,
        fingerprint: str,
        label: str,
        tokens: Tokens,
        tensors: Mapping[str, blob.Tensor],
        facts: Mapping[str, str],
    ) -> tuple[Put, Stored | None]:
        """Store a prefix. What was written is read back from the disk, and comes with its time.

        Raises OSError when the disk does not take it; nothing of it is left then.
        """
        key = key_of(fingerprint, tokens)
        data = tokens.astype("<i4").view(np.uint8)
        whole = {"tokens": blob.Tensor("I32", (len(tokens),), data), **tensors}
        packed = blob.pack(whole, {**facts, "fingerprint": fingerprint})
        entry = Entry(key, fingerprint, label, tokens, packed.size, packed.digest, time.time())
        with self._alone():
            if self.index.entry(key) is not None:
                return Put.PRESENT, None
            refused = self._make_room(packed.size)
            if refused is not None:
                self.index.count(f"refused.{refused}")
                return refused, None
            stored = self._write(entry, packed)
            self.index.publish(entry)
        self.index.count("written")
        return Put.WRITTEN, stored

    def _write(self, entry: Entry, packed: blob.Packed) -> Stored:
        path = self._blobs / entry.key
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        try:
            with self._files.create(part) as file:
                # Counted before: what dies half-way has been written all the same.
                self.index.spend(_today(), packed.size)
                blob.write(packed, file)
                self._files.sync(file)
            stored = self._read(part, entry)
            self._files.rename(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        return stored

    def _make_room(self, size: int) -> Put | None:
        """Let the least recently used go until `size` more bytes fit; why not, if they cannot."""
        if self.index.spent(_today()) + size > self.limits.daily:
            return Put.BUDGET
        entries, loose = self.entries(), self._loose()
        going = sum(entries[key].size for key in loose)
        if self.bytes - going + size > self.limits.cap:
            return Put.TOO_LARGE
        if self.free() + going - size < self.limits.floor:
            return Put.NO_ROOM  # not for our sake: let none go in vain
        self._shrink(size, loose)
        return None

    def _loose(self) -> list[str]:
        """Entries that may go, the least recently used first."""
        uses = self.uses()
        return sorted((k for k, use in uses.items() if not use.pinned), key=lambda k: uses[k].tick)

    def _shrink(self, size: int, loose: list[str]) -> int:
        """Let `loose` go, in order, until `size` more bytes fit; return how many went."""
        entries, total = self.entries(), self.bytes
        for gone, key in enumerate(loose):
            enough = self.free() - size >= self.limits.floor
            if enough and total + size <= self.limits.cap:
                return gone
            self._evict(key)
            total -= entries[key].size
        return len(loose)

    def _evict(self, key: str) -> None:
        self.index.drop(key)  # first: an entry without a blob is a miss, a blob alone an orphan
        (self._blobs / key).unlink(missing_ok=True)
        self.index.count("evicted")

    # Keeping house

    def tidy(self) -> int:
        """Remove orphans, and what is above the bounds; return how many files went.

        Does nothing while another process writes.
        """
        gone = 0
        with self._alone(wait=False) as ours:
            if not ours:
                return 0
            entries = self.entries()
            for path in self._blobs.iterdir():
                if path.name not in entries:
                    path.unlink(missing_ok=True)
                    gone += 1
            for path in sorted(self._aside.iterdir(), key=_written)[:-MOST_ASIDE]:
                path.unlink(missing_ok=True)
                gone += 1
            gone += self._shrink(0, self._loose())
        return gone

    def verify(self) -> Iterator[tuple[Entry, str | None]]:
        """Read every entry: what is wrong with it, or None. What is wrong is set aside."""
        for key, entry in self.entries().items():
            try:
                self._read(self._blobs / key, entry)
            except BadBlob as error:
                self._set_aside(key, error)
                yield entry, str(error)
            else:
                yield entry, None

    def pin(self, key: str, pinned: bool = True) -> None:
        self.index.pin(key, pinned)

    def remove(self, keys: list[str]) -> None:
        """Remove entries, pinned ones too."""
        with self._alone():
            for key in keys:
                self._evict(key)

    def purge(self) -> int:
        """Remove every entry and every file; return how many entries there were."""
        with self._alone():
            entries = self.entries()
            for key in entries:
                self._evict(key)
            for path in (*self._blobs.iterdir(), *self._aside.iterdir()):
                path.unlink(missing_ok=True)
        return len(entries)

    @property
    def bytes(self) -> int:
        """Bytes of all blobs, those set aside included."""
        return sum(entry.size for entry in self.entries().values()) + self._aside_bytes()

    def written_today(self) -> int:
        return self.index.spent(_today())

    def free(self) -> int:
        """Bytes free in the file system."""
        return self._files.free(self._blobs)

    def _aside_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._aside.iterdir())

    @contextmanager
    def _alone(self, *, wait: bool = True) -> Iterator[bool]:
        with self._changing, locked(self.folder / "lock", wait=wait) as ours:
            yield ours


def _today() -> int:
    return int(time.time() // 86400)


def _written(path: Path) -> float:
    return path.stat().st_mtime
