"""The queue as a worker sees it: lease, beat, commit, give back, and a word on itself."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from dflash_batch.worker.contract import (
    SCHEMA,
    Crash,
    ErrorCode,
    JobSpec,
    Key,
    Lease,
    ModelRef,
    RowResult,
    Shard,
    WorkerInfo,
)
from dflash_batch.worker.scripts import CRASH
from dflash_batch.worker.side import Side, chunks

COMMIT_ROWS = 64
"""Most rows of one commit; far below the arguments a script may have."""

UPLOAD_ABANDONED_MS = 86_400_000
"""An upload that stood still for so long is forgotten."""

CRASH_KEPT_S = 86_400
"""How an engine died on a shard is kept this long."""

DRAIN_ASKED_S = 86_400
"""A request to drain is kept this long, for a worker that is away."""

_PAUSED = "paused"
_JITTER = 0.25


class Committed(NamedTuple):
    """What became of a commit."""

    accepted: int  # rows recorded now
    duplicates: int  # rows that had a record already
    shard_done: bool
    batch_done: bool
    fenced: bool  # the lease is not held any more; nothing was recorded
    hungry: bool = False  # a worker has nothing to do and would take unstarted rows


class Parted(NamedTuple):
    """What became of rows that were to leave a shard."""

    lease: Lease  # with the rows that stay
    gone: bool  # False: no attempt is left, all stays as it was
    shard_done: bool  # nothing was left to do in it
    pause_s: float = 0.0  # before a row is tried again


class Heard(NamedTuple):
    """What others want of a worker."""

    drain_s: float | None  # end within so many seconds (may be infinite); None: stay
    hungry: bool  # a worker of the same model has nothing to do


class WorkerSide(Side):
    """Operations of workers; a part of `Queue`."""

    def lease(
        self,
        worker: str,
        model_key: str,
        ttl_ms: int,
        count: int,
        *,
        batch_id: str = "",
        hot: Sequence[str] = (),
        schemas: tuple[int, int] = (SCHEMA, SCHEMA),
    ) -> list[Lease]:
        """Up to `count` shards for the worker: the batch whose turn it is, then a prefix for it.

        With `batch_id` only of that batch. `hot`: groups whose prefix the worker has in its cache,
        last used first. A shard under suspicion comes alone, and only to a worker that holds
        nothing. Leases that ran out are put back first.
        """
        reaped, taken = self._run(
            "lease", worker, model_key, ttl_ms, count, batch_id, self._view, *schemas, *hot
        )
        at_once = {lease[0] for lease in taken}
        self._show_waiting([shard_id for shard_id in reaped if shard_id not in at_once])
        leases = [
            Lease(
                shard=Shard(
                    id=shard.decode(),
                    batch_id=batch.decode(),
                    group=group.decode(),
                    rows=Shard.unpacked(payload),
                ),
                epoch=epoch,
                owner=worker,
                deadline_ms=deadline,
                pending=[],
                model_key=model_key,
                deaths=deaths,
                max_attempts=attempts,
            )
            for shard, batch, epoch, deadline, group, payload, deaths, attempts, _ in taken
        ]
        again = {lease[0].decode() for lease in taken if lease[8]}
        return self._with_tried(self._with_pending(leases), again)

    def beat(self, worker: str, ttl_ms: int, held: Sequence[Lease]) -> dict[str, str]:
        """Renew all leases of a worker: shard id -> "ok", "lost" or "cancelled".

        `held` is everything the worker holds: a shard that the queue counts as the worker's and
        that is not in it (the answer of its lease was lost) is put back. A lease that ran out and
        that nobody took is given back to its owner.
        """
        pairs = [item for lease in held for item in (lease.shard.id, lease.epoch)]
        verdicts, orphans = self._run("beat", worker, ttl_ms, self._view, *pairs)
        self._show_waiting(orphans)
        return {
            lease.shard.id: verdict.decode() for lease, verdict in zip(held, verdicts, strict=True)
        }

    def commit(self, lease: Lease, results: Sequence[RowResult]) -> Committed:
        """Record rows of a shard that the caller holds; the first record of a row stays."""
        total = Committed(0, 0, False, False, False)
        for chunk in chunks(results, COMMIT_ROWS):
            rows = [item for row in chunk for item in (row.index, _why(row), row.packed())]
            accepted, duplicates, shard_done, batch_done, fenced, hungry = self._run(
                "commit", lease.shard.id, lease.epoch, lease.owner, *rows
            )
            total = Committed(
                total.accepted + accepted,
                total.duplicates + duplicates,
                bool(shard_done),
                bool(batch_done),
                bool(fenced),
                bool(hungry),
            )
        return total

    def release(self, lease: Lease, *, crashed: bool = False) -> bool:
        """Put a shard back at the front, with blame if an engine died on it.

        False when it was not held any more.
        """
        suspicion = CRASH if crashed else 0
        return bool(self._run("release", lease.shard.id, lease.epoch, lease.owner, suspicion))

    def note_crash(self, shard_id: str, crash: Crash) -> None:
        """Keep how an engine died on the shard, for who holds it next."""
        self.client.set(Key.crash(shard_id), crash.dump(), ex=CRASH_KEPT_S)

    def last_crash(self, shard_id: str) -> Crash | None:
        """What `note_crash` kept last."""
        data = self.client.get(Key.crash(shard_id))
        return None if data is None else Crash.parse(data)

    def give_back(self, lease: Lease, rows: Sequence[JobSpec]) -> Parted | None:
        """Unstarted rows of a held shard become a shard of their own, for whoever is idle.

        None when the shard is not held any more, or its batch is being cancelled. Raises
        ValueError when one of the rows has a record.
        """
        new, rest = _parted(lease, rows)
        answer, ended = self._run(
            "give_back", *_named(lease), *_payloads(new, rest), *(row.index for row in rows)
        )
        if answer < 0:
            raise ValueError(f"rows of {lease.shard.id} that have a record cannot be given back")
        if not answer:
            return None
        if self.mirror:
            self.mirror.enqueue([new.id])
        return Parted(rest, True, bool(ended))

    def retry_row(self, lease: Lease, row: JobSpec) -> Parted | None:
        """A row failed for a reason that may pass: it is tried again later, by anybody.

        None when the shard is not held any more, or its batch is being cancelled. When no attempt
        is left the row stays (`gone` is False), and its failure is to be recorded.
        """
        new, rest = _parted(lease, [row])
        jitter = random.uniform(1 - _JITTER, 1 + _JITTER)
        pause_ms, ended = self._run(
            "retry_row", *_named(lease), *_payloads(new, rest), jitter, row.index
        )
        if not pause_ms:
            return None
        if pause_ms < 0:
            return Parted(lease, False, False)
        if self.mirror:
            self.mirror.enqueue([new.id])
        return Parted(rest, True, bool(ended), pause_ms / 1000)

    def reap(self) -> int:
        """Put back the shards (at most 100) whose lease ran out. Returns how many."""
        reaped = self._run("reap", 100)
        self._show_waiting(reaped)
        return len(reaped)

    def sweep(self) -> list[str]:
        """Clear away what nobody needs. Returns uploads that were abandoned, to be forgotten."""
        abandoned = self._run("sweep", UPLOAD_ABANDONED_MS)
        return [batch_id.decode() for batch_id in abandoned]

    # --- workers and what there is for them --------------------------------------------------

    def announce(self, info: WorkerInfo, ttl_s: int) -> Heard:
        """Let others see the worker for `ttl_s` seconds, and hear what they want of it."""
        with self.client.pipeline() as pipe:
            pipe.set(Key.worker(info.name), info.dump(), ex=ttl_s)
            pipe.sadd(Key.WORKERS, info.name)
            pipe.get(Key.drain(info.name))
            pipe.exists(Key.hungry(info.model_key))
            _, _, grace, hungry = pipe.execute()
        return Heard(None if grace is None else float(grace), bool(hungry))

    def retire(self, name: str) -> None:
        """The worker is gone for good."""
        with self.client.pipeline() as pipe:
            pipe.delete(Key.worker(name), Key.drain(name))
            pipe.srem(Key.WORKERS, name)
            pipe.execute()

    def drain(self, name: str, grace_s: float) -> None:
        """Have a worker end: from now on it gets nothing, and it finishes what it holds.

        What is not finished within `grace_s` (may be infinite) is given back.
        """
        self.client.set(Key.drain(name), str(grace_s), ex=DRAIN_ASKED_S)

    def workers(self) -> list[WorkerInfo]:
        """The workers that were seen lately."""
        names = sorted(name.decode() for name in self.client.smembers(Key.WORKERS))
        infos = self.client.mget([Key.worker(name) for name in names]) if names else []
        return [WorkerInfo.parse(info) for info in infos if info is not None]

    def pause_all(self) -> None:
        """Nobody leases anything; rows in hand are finished."""
        self.client.hset(Key.META, _PAUSED, 1)

    def resume_all(self) -> bool:
        """Undo `pause_all`. False when it was not paused."""
        return bool(self.client.hdel(Key.META, _PAUSED))

    @property
    def paused(self) -> bool:
        """Whether `pause_all` holds."""
        return bool(self.client.hexists(Key.META, _PAUSED))

    def wanted(self) -> list[ModelRef]:
        """Models with shards ready to be leased; for workers, as it puts back what ran out."""
        self.reap()
        models = {key.decode(): value for key, value in self.client.hgetall(Key.MODELS).items()}
        with self.client.pipeline(transaction=False) as pipe:
            for key in models:
                pipe.exists(Key.runnable(key))
            runnable = pipe.execute()
        ready = [key for key, any_ready in zip(models, runnable, strict=True) if any_ready]
        known = [_model(models[key]) for key in ready]
        # a key of another schema is not ours to load: we could not lease its shards
        return [m for key, m in zip(ready, known, strict=True) if m is not None and m.key == key]

    def shard_states(self, shard_ids: Sequence[str]) -> dict[str, str | None]:
        """Shard id -> a state of states.SHARD, or None when it is unknown."""
        with self.client.pipeline(transaction=False) as pipe:
            for shard_id in shard_ids:
                pipe.hget(Key.shard(shard_id), "st")
            states = pipe.execute()
        return {
            shard_id: state.decode() if state else None
            for shard_id, state in zip(shard_ids, states, strict=True)
        }

    # -----------------------------------------------------------------------------------------

    def _show_waiting(self, shard_ids: Iterable[bytes]) -> None:
        if self.mirror and shard_ids:
            self.mirror.requeue([shard_id.decode() for shard_id in shard_ids])

    def _with_pending(self, leases: list[Lease]) -> list[Lease]:
        """Add which rows have no record. Safe after the lease: only its holder can set the bits."""
        again = [lease for lease in leases if lease.epoch > 1]  # at first nobody has run anything
        with self.client.pipeline(transaction=False) as pipe:
            for lease in again:
                for row in lease.shard.rows:
                    pipe.getbit(Key.done(lease.shard.batch_id), row.index)
            bits = iter(pipe.execute())
        return [
            lease.model_copy(
                update={
                    "pending": [
                        row.index for row in lease.shard.rows if lease.epoch == 1 or not next(bits)
                    ]
                }
            )
            for lease in leases
        ]

    def _with_tried(self, leases: list[Lease], again: set[str]) -> list[Lease]:
        """Add what rows of the shards `again` were tried before."""
        return [
            lease.model_copy(update={"tried": self._tried(lease)})
            if lease.shard.id in again
            else lease
            for lease in leases
        ]

    def _tried(self, lease: Lease) -> dict[int, int]:
        rows = [row.index for row in lease.shard.rows]
        counts = self.client.hmget(Key.attempts(lease.shard.batch_id), rows)
        return {row: int(count) for row, count in zip(rows, counts, strict=True) if count}


def _model(data: bytes) -> ModelRef | None:
    """None for what a newer version wrote and we cannot read."""
    try:
        return ModelRef.parse(data)
    except ValidationError:
        return None


def _why(result: RowResult) -> str:
    """The error code of a row that failed, "" of one that did not."""
    return "" if result.ok else result.code or ErrorCode.INTERNAL_ERROR.value


def _parted(lease: Lease, rows: Sequence[JobSpec]) -> tuple[Shard, Lease]:
    """A new shard of `rows`, and the lease of the others. The same rows give the same id."""
    leaving = {row.index for row in rows}
    shard = lease.shard
    new = shard.model_copy(
        update={"id": f"{shard.id}_{lease.epoch}_{rows[0].index}", "rows": list(rows)}
    )
    stay = [row for row in shard.rows if row.index not in leaving]
    rest = lease.model_copy(
        update={
            "shard": shard.model_copy(update={"rows": stay}),
            "pending": [index for index in lease.pending if index not in leaving],
        }
    )
    return new, rest


def _named(lease: Lease) -> tuple[str, int, str]:
    return lease.shard.id, lease.epoch, lease.owner


def _payloads(new: Shard, rest: Lease) -> tuple[Any, ...]:
    return new.id, new.packed().payload, rest.shard.packed().payload
