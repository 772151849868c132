"""The SSD tier as the decoder sees it: prefixes of one model and draft, and no trouble.

Whatever goes wrong on the disk is counted, logged once for each kind, and survived: a read is a
miss then, a write is left out. After several failures in a row the tier is off until the next
start. Writing is done by a thread, from MLX's own memory, while decoding goes on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_batch.decoder.prefix import Held, Tokens, common
from dflash_batch.decoder.store import codec
from dflash_batch.decoder.store.errors import StoreError
from dflash_batch.decoder.store.index import CACHE_ERRORS, Entry, key_of
from dflash_batch.decoder.store.pace import Judge, Pace
from dflash_batch.decoder.store.store import Put, Store, Stored
from dflash_batch.decoder.trie import Trie

NEW_SHARE = 0.25
"""Least share of an entry that no other entry holds: else the disk fills with copies."""

MOST_PENDING = 2
"""Most writes under way. What is offered beyond them is left for its next use."""

MOST_FAILURES = 8
"""Failures in a row after which the tier is off."""

_log = logging.getLogger("dflash_batch")


class _Found(NamedTuple):
    """An entry, and how much of a prompt it can stand for."""

    entry: Entry
    length: int


@dataclass(slots=True)
class _Writing:
    """A write under way, and what it needs kept."""

    tokens: Tokens
    held: Held
    tensors: Any
    done: Future[tuple[Put, Stored | None]]


class Ssd:
    """Prefixes on SSD under one fingerprint. No method raises for what a disk does."""

    def __init__(
        self,
        store: Store,
        fingerprint: str,
        label: str,
        *,
        cuttable: bool,
        judge: Judge | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._store = store
        self._fingerprint = fingerprint
        self._label = label
        self._cuttable = cuttable
        self._failures = 0
        self._seen: dict[str, Entry] = {}  # of our fingerprint, as of the last look
        self._known: dict[str, Entry] | None = None
        self._trie = Trie[str]()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-writer")
        self._pending: list[_Writing] = []
        self._judge = judge or self._remembered()
        with self._surviving("tidy"):
            store.tidy()

    @property
    def on(self) -> bool:
        return self._failures < MOST_FAILURES

    @property
    def pending_bytes(self) -> int:
        """Bytes that writes under way keep in memory."""
        self._reap()
        return sum(writing.held.bytes for writing in self._pending)

    def computed(self, tokens: int, seconds: float) -> None:
        """A prefill of one row, for comparison with reading."""
        self._judge.computed(tokens, seconds)

    # Reading

    def load(self, prompt: Tokens, have: int) -> Held | None:
        """The stored prefix that saves most of `prompt` beyond its first `have` tokens.

        None where there is none, or where computing is faster.
        """
        while self.on:
            found = self._find(prompt)
            if found is None or found.length <= have:
                return None
            if not self._judge.worth(found.length - have, found.entry.size):
                self.counts["below_break_even"] += 1
                return None
            held = self._read(found.entry)
            if held is not None:
                return held
        return None

    def _read(self, entry: Entry) -> Held | None:
        """A prefix from disk; None if it is damaged. Then its entry is gone."""
        with self._surviving("read"):
            stored = self._store.get(entry.key)
            if stored is None:
                self._count("damaged")
                return None
            begun = time.perf_counter()
            target, draft = codec.decode(stored.tensors, stored.facts["tree"])
            if target.length != entry.length:
                raise ValueError("a snapshot of another length")
            mx.eval(target.arrays())
            seconds = stored.seconds + time.perf_counter() - begun
            self._judge.read(entry.size, seconds)
            self._failures = 0
            self._count("hits")
            self._count("tokens_read", entry.length)
            return Held(entry.tokens, target, draft, codec.size((target, draft)), entry.length)
        return None

    def _find(self, prompt: Tokens) -> _Found | None:
        """The entry that stands for most of `prompt`; its last token is always run."""
        self._look()
        shared, leaf = self._trie.nearest(prompt)
        longest = min(shared, len(prompt) - 1)
        if leaf is None or not longest:
            return None
        if self._cuttable:
            return _Found(self._seen[leaf.items[0][1]], longest)
        lengths = {entry.length for entry in self._seen.values() if entry.length <= longest}
        for length in sorted(lengths, reverse=True):
            entry = self._seen.get(key_of(self._fingerprint, prompt[:length]))
            if entry is not None:
                return _Found(entry, length)
        return None

    def _look(self) -> None:
        """Bring what we know of the store up to date."""
        with self._surviving("look"):
            known = self._store.entries()
            if known is self._known:
                return
            self._known = known
            ours = {k: e for k, e in known.items() if e.fingerprint == self._fingerprint}
            for key in self._seen.keys() - ours.keys():
                self._trie.discard(key)
            for key in ours.keys() - self._seen.keys():
                self._trie.add(ours[key].tokens, key)
            self._seen = ours

    def why_not(self, prompt: Tokens, have: int) -> str | None:
        """Why nothing stored serves `prompt` better than `have` tokens do; None if it need not."""
        if not self.on:
            return "off"
        if not self._seen:
            return "empty"
        shared, leaf = self._trie.nearest(prompt)
        if leaf is None or not shared:
            return "no_common_prefix"
        found = self._find(prompt)
        if found is None:
            return f"no_snapshot_before:{shared}"
        if found.length <= have:
            return None
        if shared < len(leaf.tokens):
            return f"diverges_at:{shared}"
        return f"below_break_even:{found.length}"

    # Writing

    def met(self, tokens: Tokens) -> bool:
        """Whether a prefix was computed before, by whatever process. It has been, from now on."""
        with self._surviving("meet"):
            return self._store.index.meet(key_of(self._fingerprint, tokens))
        return False

    def offer(self, held: Held, length: int) -> None:
        """Store the first `length` tokens of a prefix that has proved of use, if that pays."""
        self._reap()
        if not self.on or not length or len(self._pending) >= MOST_PENDING:
            self.counts["not_offered"] += 1
            return
        self._look()
        tokens = held.tokens[:length]
        new = length - self._covered(tokens)
        size = held.bytes * length // len(held.tokens)
        if new < NEW_SHARE * length or not self._judge.worth(new, size):
            return
        with self._surviving("write"):
            try:
                tensors, tree = codec.encode((held.target.first(length), held.draft.first(length)))
            except codec.Unstorable as error:
                self._failed("unstorable", error)
                return
            done = self._writer.submit(
                self._store.put, self._fingerprint, self._label, tokens, tensors, {"tree": tree}
            )
            self._pending.append(_Writing(tokens, held, tensors, done))

    def _covered(self, tokens: Tokens) -> int:
        """How many of `tokens` the store, or a write under way, could give."""
        there = [w.tokens for w in self._pending]
        if self._cuttable:
            return max(self._trie.nearest(tokens)[0], *(common(tokens, t) for t in there), 0)
        there += [entry.tokens for entry in self._seen.values() if entry.length <= len(tokens)]
        return max((len(t) for t in there if common(t, tokens) == len(t)), default=0)

    def _reap(self) -> None:
        """Take in the writes that have ended."""
        for writing in [w for w in self._pending if w.done.done()]:
            self._pending.remove(writing)
            with self._surviving("write"):
                put, stored = writing.done.result()
                self.counts[put.value] += 1
                self._failures = 0
                if stored is not None:
                    self._judge.read(stored.size, stored.seconds)

    def close(self) -> None:
        """Let writes under way end, and give the store back."""
        self._writer.submit(self._store.close)  # a thread has a connection of its own
        self._writer.shutdown(wait=True)
        self._reap()
        with self._surviving("close"):
            if isinstance(self._judge, Pace):
                self._store.index.remember(f"pace:{self._fingerprint}", self._judge.dump())
            self._store.close()

    def _remembered(self) -> Pace:
        with self._surviving("pace"):
            return Pace.restored(self._store.index.memo(f"pace:{self._fingerprint}"))
        return Pace()

    # Trouble

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, *CACHE_ERRORS) as error:
            self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        name = f"error.{what}"
        if name not in self.counts:
            _log.warning("prefix_store_error what=%s reason=%r", what, _reason(error))
        self.counts[name] += 1
        self._failures += 1
        if self._failures == MOST_FAILURES:
            _log.warning("prefix_store_off failures=%d", self._failures)
        try:
            self._store.index.count(name)
        except (StoreError, *CACHE_ERRORS):
            pass  # it is counted above, and the index may be what is out of order

    def _count(self, name: str, more: int = 1) -> None:
        self.counts[name] += more
        self._store.index.count(name, more)


def _reason(error: Exception) -> str:
    """Its kind, and the system's own words: nothing of a prompt is in either."""
    text = getattr(error, "strerror", None) or (str(error) if isinstance(error, StoreError) else "")
    return f"{type(error).__name__} {text}".strip()
