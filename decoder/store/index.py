"""What the store holds: one entry for each blob, and counters, in a diskcache (JSON, no pickle).

Several processes share it. `generation` changes with the entries, so that a copy in memory is
known to be old. Use is counted in ticks and not in seconds: a clock may be set back.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diskcache
import numpy as np
import numpy.typing as npt

from dflash_batch.decoder.store.errors import StoreUnusable

Tokens = npt.NDArray[np.int32]

CACHE_ERRORS = (OSError, sqlite3.Error, diskcache.Timeout, ValueError, KeyError, TypeError)
"""What a disk, a database and what others wrote into it can raise."""

MOST_MET = 8192
"""Prefixes remembered to have been met, stored or not."""

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Entry:
    """A published blob."""

    key: str
    fingerprint: str  # of model, draft and engine: see fingerprint.py
    label: str  # the model's name, for people
    tokens: Tokens
    size: int  # bytes of the file
    digest: str  # SHA-256 of its header
    created: float  # Unix seconds, for people

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Use:
    """How an entry has been used."""

    tick: int = 0  # when last
    count: int = 0
    pinned: bool = False


def key_of(fingerprint: str, tokens: Tokens) -> str:
    """The name of a prefix under a fingerprint, 32 hex digits."""
    text = fingerprint.encode() + b"\0" + tokens.astype("<i4").tobytes()
    return hashlib.sha256(text).hexdigest()[:32]


class Index:
    """Entries by key, their use, and named counters. Raises what CACHE_ERRORS lists."""

    def __init__(self, folder: Path) -> None:
        self._db = _opened(folder)

    def close(self) -> None:
        self._db.close()

    @property
    def generation(self) -> int:
        return self.counter("generation")

    def entries(self) -> dict[str, Entry]:
        names = [name for name in self._db if str(name).startswith("entry:")]
        found = (self.entry(name.removeprefix("entry:")) for name in names)
        return {entry.key: entry for entry in found if entry is not None}

    def entry(self, key: str) -> Entry | None:
        """An entry; None, and it is gone, when it is not of our making."""
        data = self._db.get(f"entry:{key}")
        if data is None:
            return None
        try:
            ids = np.frombuffer(base64.b64decode(data.pop("tokens")), dtype="<i4")
            return Entry(**data, tokens=ids.astype(np.int32))
        except (AttributeError, KeyError, TypeError, ValueError):
            self.drop(key)
            self.count("set_aside")
            return None

    def publish(self, entry: Entry) -> None:
        """Make an entry known. Its blob is on disk by now."""
        tokens = base64.b64encode(entry.tokens.astype("<i4").tobytes()).decode()
        with self._change():
            self._db.set(f"entry:{entry.key}", {**asdict(entry), "tokens": tokens})
            self._use(entry.key, count=0)

    def drop(self, key: str) -> None:
        """Forget an entry, if it is there."""
        with self._change():
            self._db.pop(f"entry:{key}")
            self._db.pop(f"use:{key}")

    def use(self, key: str) -> Use:
        return Use(**self._db.get(f"use:{key}", {}))

    def touch(self, key: str) -> None:
        """The entry was of use just now."""
        with self._db.transact():
            self._use(key, count=1)

    def pin(self, key: str, pinned: bool) -> None:
        """Whether the entry is to stay, whatever room is needed."""
        with self._db.transact():
            now = self.use(key)
            self._db.set(f"use:{key}", asdict(Use(now.tick, now.count, pinned)))

    def meet(self, key: str) -> bool:
        """Whether a prefix was met before. It has been, from now on."""
        with self._db.transact():
            before = self._db.get(f"met:{key}") is not None
            self._db.set(f"met:{key}", self.count("tick"))
            if not before and self.count("met") > MOST_MET:
                self._forget_met()
        return before

    def _forget_met(self) -> None:
        """Forget the older half."""
        names = [name for name in self._db if str(name).startswith("met:")]
        names.sort(key=lambda name: int(self._db.get(name, 0)))
        for name in names[: len(names) // 2]:
            self._db.pop(name)
        self._db.set("count:met", len(names) - len(names) // 2)

    def count(self, name: str, more: int = 1) -> int:
        """Add to a counter and return it."""
        with self._db.transact():
            value = self.counter(name) + more
            self._db.set(f"count:{name}", value)
        return value

    def counter(self, name: str) -> int:
        return int(self._db.get(f"count:{name}", 0))

    def counters(self) -> dict[str, int]:
        names = [str(name) for name in self._db if str(name).startswith("count:")]
        return {name.removeprefix("count:"): int(self._db.get(name, 0)) for name in sorted(names)}

    def spend(self, day: int, more: int) -> None:
        """Note bytes written on a day, counted from 1970. Another day starts from nothing."""
        with self._db.transact():
            self._db.set("spent", [day, self.spent(day) + more])

    def spent(self, day: int) -> int:
        then, amount = self._db.get("spent", [day, 0])
        return int(amount) if then == day else 0

    def memo(self, name: str) -> Any:
        """A remembered JSON value, or None."""
        return self._db.get(f"memo:{name}")

    def remember(self, name: str, value: Any) -> None:
        self._db.set(f"memo:{name}", value)

    def _use(self, key: str, count: int) -> None:
        now = self.use(key)
        use = Use(self.count("tick"), now.count + count, now.pinned)
        self._db.set(f"use:{key}", asdict(use))

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._db.transact():
            yield
            self.count("generation")


def _opened(folder: Path) -> diskcache.Cache:
    """The database in `folder`; one that cannot be read is moved away and made anew.

    Its blobs are then nobody's, and go as orphans do.
    """
    try:
        return _open(folder)
    except (OSError, sqlite3.OperationalError, diskcache.Timeout) as error:
        raise StoreUnusable(f"{folder}: {error}") from error
    except sqlite3.DatabaseError:
        pass  # it is damaged, not only out of reach
    broken = folder.with_name(f"{folder.name}.broken")
    try:
        shutil.rmtree(broken, ignore_errors=True)
        folder.rename(broken)
        return _open(folder)
    except (OSError, sqlite3.Error) as error:
        raise StoreUnusable(f"{folder}: {error}") from error


def _open(folder: Path) -> diskcache.Cache:
    db = diskcache.Cache(
        str(folder),
        disk=diskcache.JSONDisk,
        eviction_policy="none",
        disk_min_file_size=1 << 26,  # tokens stay in the database: one file, one transaction
        timeout=_TIMEOUT_S,
    )
    db.get("count:generation")  # a database that is none says so here
    return db
