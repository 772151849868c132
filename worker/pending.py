"""Records that wait on this machine's disk while the queue cannot take them.

A worker that is killed, or a machine that restarts, while the queue is away would lose what it
decoded since. The next worker of this home delivers it, in the name of the dead one: under its
leases, so that only what nobody has taken over is recorded.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import diskcache

from dflash_batch.worker.contract import Lease, Record, RowResult
from dflash_batch.worker.holdings import Held
from dflash_batch.worker.home import HomeError, private_dir
from dflash_batch.worker.locks import locked
from dflash_batch.worker.log import say, warn
from dflash_batch.worker.queue import Queue


class Undelivered(Record):
    """Rows of one lease that are decoded and not recorded."""

    lease: Lease  # without its rows
    results: list[RowResult]


class Pending:
    """The records of one worker, while it holds their leases. Bounded by what it holds.

    Several workers of a home share the folder; each queue has its own.
    """

    def __init__(self, store: diskcache.Cache, folder: Path, worker: str) -> None:
        self._store = store
        self._folder = folder
        self._worker = worker
        self._kept: dict[str, int] = {}  # shard id -> records on disk
        self._failing = False

    def follow(self, waiting: Iterable[Held], *, away: bool) -> None:
        """Let the disk have what waits for its commit, while the queue is away.

        A disk that is full costs nothing but this safety.
        """
        left = dict(self._kept)
        try:
            for held in waiting:
                shard_id = held.lease.shard.id
                left.pop(shard_id, None)
                if away and self._kept.get(shard_id) != len(held.finished):
                    self._store.set(self._key(shard_id), _undelivered(held))
                    self._kept[shard_id] = len(held.finished)
            for shard_id in left:
                self._store.delete(self._key(shard_id))
                del self._kept[shard_id]
        except (sqlite3.Error, OSError) as error:
            if not self._failing:
                warn("not_kept", error=error)
            self._failing = True

    @contextmanager
    def left_behind(self) -> Iterator[list[Undelivered]]:
        """What workers that are dead could not deliver; gone after the block, unless it raises.

        All of one worker's come together.
        """
        with ExitStack() as stack:
            keys = [key for key in self._store.iterkeys() if _worker_of(key) != self._worker]
            dead = {
                worker
                for worker in sorted({_worker_of(key) for key in keys})
                if stack.enter_context(locked(self._folder / f"{worker}.lock"))
            }
            keys = [key for key in keys if _worker_of(key) in dead]
            values = [self._store.get(key) for key in keys]
            yield [Undelivered.model_validate(value) for value in values if value is not None]
            for key in keys:
                self._store.delete(key)

    def _key(self, shard_id: str) -> str:
        return f"{self._worker}\n{shard_id}"


def deliver(pending: Pending, queue: Queue, ttl_ms: int) -> None:
    """Record what dead workers of this home left behind, as far as nobody has taken it over."""
    try:
        _deliver(pending, queue, ttl_ms)
    except sqlite3.Error as error:  # those rows are run again
        warn("not_delivered", error=error)


def _deliver(pending: Pending, queue: Queue, ttl_ms: int) -> None:
    with pending.left_behind() as left:
        for worker in {one.lease.owner for one in left}:
            theirs = [one for one in left if one.lease.owner == worker]
            # all leases in one beat: what it does not name is put back
            verdicts = queue.beat(worker, ttl_ms, [one.lease for one in theirs])
            for one in theirs:
                rows = _record(queue, one) if verdicts[one.lease.shard.id] == "ok" else 0
                say("delivered", shard=one.lease.shard.id, rows=rows, of=len(one.results))


def _record(queue: Queue, one: Undelivered) -> int:
    """Commit, and put back what is left of the shard."""
    committed = queue.commit(one.lease, one.results)
    shard_ids = [one.lease.shard.id]
    released = queue.release(one.lease)
    if queue.mirror and committed.shard_done:
        queue.mirror.end(shard_ids)
    elif queue.mirror and released:
        queue.mirror.requeue(shard_ids)
    return committed.accepted


@contextmanager
def open_pending(folder: Path, url: str, worker: str) -> Iterator[Pending]:
    """The place of `worker` in `folder`, for the queue at `url`. Raises HomeError."""
    parts = urlsplit(url)
    address = f"{parts.hostname}:{parts.port}{parts.path}"  # a new password is no new queue
    private_dir(folder)
    place = private_dir(folder / hashlib.sha256(address.encode()).hexdigest()[:16])
    with locked(place / f"{worker}.lock"):
        store = _open(place / "records")
        try:
            yield Pending(store, place, worker)
        finally:
            store.close()


def _open(folder: Path) -> diskcache.Cache:
    """The store; a damaged one is begun anew, since all in it can be decoded again."""
    for again in (True, False):
        try:
            return diskcache.Cache(str(folder), disk=diskcache.JSONDisk, eviction_policy="none")
        except sqlite3.DatabaseError as error:
            if not again:
                raise HomeError(f"{folder} cannot be used: {error}. Remove it.") from error
            warn("pending_damaged", folder=folder, error=error)
            shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError("unreachable")


def _undelivered(held: Held) -> dict[str, Any]:
    shard = held.lease.shard.model_copy(update={"rows": []})
    bare = held.lease.model_copy(update={"shard": shard, "pending": []})
    return Undelivered(lease=bare, results=held.finished).model_dump(mode="json")


def _worker_of(key: str) -> str:
    return key.partition("\n")[0]
