"""The queue: what producers and workers say to Redis. The state machine itself is queue.lua.

All names of keys come from contract.py. Time is the server's. Every call may be repeated: after a
lost answer the second one finds the work done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import redis
from pydantic import ValidationError
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import OutOfMemoryError, ResponseError
from redis.retry import Retry

from dflash_batch.worker.address import tls_options
from dflash_batch.worker.contract import (
    Batch,
    BatchState,
    BatchStatus,
    Crash,
    ErrorCode,
    JobSpec,
    Key,
    Lease,
    ModelRef,
    RowResult,
    RowStatus,
    Shard,
    WorkerInfo,
)
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.mirror import Mirror

CRASH = 2
"""Suspicion of a death that was seen: the engine died with the shard in it."""

EXPIRY = 1
"""Suspicion of a lease that ran out: sleep and partitions look the same."""

KEEP_S = 7 * 86400
"""Results and the record of a batch are kept this long after its end."""

COMMIT_ROWS = 64
"""Most rows of one commit; far below the arguments a script may have."""

_CHUNK = 200
_CRASH_KEPT_S = 86400
_TIMEOUT_S = 5.0
_LONGEST_BLOCK_MS = 2000  # below the socket's timeout, or an idle wait would look like an outage

_T = TypeVar("_T")


class QueueUnreachable(UserError):
    """Raised when no server answers at the queue's address."""

    code: ClassVar[str] = "queue_unreachable"


class QueueRefused(UserError):
    """Raised when a batch is unknown, sealed or incomplete, and what was sent is not accepted."""

    code: ClassVar[str] = "queue_refused"


class Committed(NamedTuple):
    """What became of a commit."""

    accepted: int  # rows recorded now
    duplicates: int  # rows that had a record already
    shard_done: bool
    batch_done: bool
    fenced: bool  # the lease is not held any more; nothing was recorded


def connect(url: str, *, retries: int = 3, timeout_s: float = _TIMEOUT_S) -> redis.Redis:
    """A client for `url` (unix://, redis://, rediss://) that has answered once.

    Raises QueueUnreachable. A call on it that fails, or that is not answered within `timeout_s`, is
    tried again up to `retries` times, within a few seconds.
    """
    try:
        client = redis.Redis.from_url(
            url,
            protocol=2,
            decode_responses=False,
            **tls_options(url),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            health_check_interval=15,
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), retries),
        )
        client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise QueueUnreachable(
            f"no queue at {_without_password(url)}: {error}. "
            "Start the server, or check --redis and DFLASH_BATCH_REDIS."
        ) from error
    return client


def is_outage(error: redis.RedisError) -> bool:
    """Whether the server is away or cannot write now, so that trying again later helps."""
    passing = ("MISCONF", "READONLY", "LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN")
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | OutOfMemoryError) or (
        isinstance(error, ResponseError) and str(error).startswith(passing)
    )


class Queue:
    """The queue on one client. Not for use by several threads at once."""

    def __init__(self, client: redis.Redis, *, mirror: bool = True) -> None:
        self.client: Any = client  # redis-py's types leave open whether answers are decoded
        self.mirror = Mirror(client) if mirror else None
        self._view = self.mirror.waiting_list if self.mirror else ""
        self._script = client.register_script(_script_text())

    # --- producers ---------------------------------------------------------------------------

    def create(self, batch: Batch) -> bool:
        """Begin the upload of a batch. False when it exists already; it is left as it is."""
        return bool(
            self._run(
                "create",
                batch.id,
                batch.created or time.time(),
                batch.model.key,
                batch.model.dump(),
                batch.dump(),
                batch.schema_,
                batch.max_attempts,
            )
        )

    def add(self, shards: Sequence[Shard]) -> None:
        """Upload shards of a batch that is not sealed; those that are there already are kept.

        Raises QueueRefused when the batch is unknown or sealed.
        """
        for chunk in _chunks(shards, _CHUNK):
            with self.client.pipeline(transaction=False) as pipe:
                for shard in chunk:
                    packed = shard.packed()
                    self._script(
                        keys=[Key.META],
                        args=[
                            "add",
                            shard.id,
                            shard.batch_id,
                            shard.group,
                            len(shard.rows),
                            packed,
                        ],
                        client=pipe,
                    )
                answers = pipe.execute()
            if -1 in answers:
                raise QueueRefused(f"batch {chunk[0].batch_id} is unknown or takes no more rows")
            if self.mirror:
                self.mirror.enqueue([shard.id for shard in chunk])

    def seal(self, batch_id: str, total: int) -> None:
        """The upload is complete, `total` rows: workers may begin. Raises QueueRefused."""
        answer = self._run("seal", batch_id, total)
        if answer == -1:
            raise QueueRefused(f"batch {batch_id} is unknown")
        if answer == -2:
            raise QueueRefused(f"batch {batch_id} has not all of its {total} rows in the queue")

    def status(self, batch_id: str) -> BatchStatus | None:
        """The batch now, or None when it is unknown."""
        fields = self.client.hgetall(Key.batch(batch_id))
        return _status(fields) if b"spec" in fields else None

    def batches(self) -> list[BatchStatus]:
        """All batches, newest first."""
        known = [
            (batch_id.decode(), self.status(batch_id.decode()))
            for batch_id in self.client.zrevrange(Key.BATCHES, 0, -1)
        ]
        if expired := [batch_id for batch_id, status in known if status is None]:
            self.client.zrem(Key.BATCHES, *expired)
        return [status for _, status in known if status is not None]

    def results(
        self, batch_id: str, after: str = "0-0", count: int = 256, block_ms: int = 1000
    ) -> list[tuple[str, RowResult]]:
        """Up to `count` records after stream id `after`, oldest first, as (stream id, record).

        Waits up to `block_ms` (at most 2 s) for the first one.
        """
        block = min(block_ms, _LONGEST_BLOCK_MS) or None
        answer = self.client.xread({Key.results(batch_id): after}, count=count, block=block)
        entries = answer[0][1] if answer else []
        return [(entry.decode(), RowResult.unpacked(fields[b"r"])) for entry, fields in entries]

    def acknowledge(self, batch_id: str, stream_id: str) -> None:
        """The records up to `stream_id` are on the client's disk: the queue forgets them."""
        if not self.client.exists(Key.batch(batch_id)):
            return  # forgotten meanwhile; writing would bring a piece of it back
        milliseconds, number = stream_id.split("-")
        # by itself and first: a server whose memory is full takes this, and nothing that may grow
        self.client.xtrim(
            Key.results(batch_id), minid=f"{milliseconds}-{int(number) + 1}", approximate=False
        )
        with suppress(OutOfMemoryError):  # a note for people; the stream itself says the same
            self.client.hset(Key.batch(batch_id), "exported", stream_id)

    def cancel(self, batch_id: str) -> bool:
        """End a batch: rows without a record get one that says `cancelled`.

        False when it is unknown or over. Workers that hold rows of it learn so at their next beat,
        and cannot record them any more.
        """
        if not self._run("cancel", batch_id):
            return False
        status = self.status(batch_id)
        owner = f"cancel-{uuid4().hex}"
        for shard_id in self._shard_ids(batch_id):
            answer = self._run("seize", shard_id, owner, 60_000)
            if answer and status:
                lease = self._seized(shard_id, batch_id, owner, answer, status.batch.model.key)
                self.commit(lease, [_cancelled(row) for row in lease.shard.rows])
            if self.mirror:
                self.mirror.end([shard_id])
        return True

    def forget(self, batch_id: str) -> None:
        """Delete all that is stored of a batch, RQ's jobs included."""
        self._run("cancel", batch_id)  # so that nobody leases what is going away
        for chunk in _chunks(list(self._shard_ids(batch_id)), _CHUNK):
            self._run("drop", batch_id, *chunk)
            self.client.delete(*(Key.crash(shard_id) for shard_id in chunk))
            if self.mirror:
                self.mirror.forget(chunk)
        self._run("forget", batch_id)

    # --- workers -----------------------------------------------------------------------------

    def lease(
        self, worker: str, model_key: str, ttl_ms: int, count: int, *, batch_id: str = ""
    ) -> list[Lease]:
        """Up to `count` shards for the worker, from the batch that had least so far.

        With `batch_id` only of that batch. A shard under suspicion comes alone, and only to a
        worker that holds nothing. Leases that ran out are put back first.
        """
        reaped, taken = self._run("lease", worker, model_key, ttl_ms, count, batch_id, self._view)
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
            for shard, batch, epoch, deadline, group, payload, deaths, attempts in taken
        ]
        return self._with_pending(leases)

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
        for chunk in _chunks(results, COMMIT_ROWS):
            rows = [item for row in chunk for item in (row.index, int(row.ok), row.packed())]
            accepted, duplicates, shard_done, batch_done, fenced = self._run(
                "commit", lease.shard.id, lease.epoch, lease.owner, *rows
            )
            total = Committed(
                total.accepted + accepted,
                total.duplicates + duplicates,
                bool(shard_done),
                bool(batch_done),
                bool(fenced),
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
        self.client.set(Key.crash(shard_id), crash.dump(), ex=_CRASH_KEPT_S)

    def last_crash(self, shard_id: str) -> Crash | None:
        """What `note_crash` kept last."""
        data = self.client.get(Key.crash(shard_id))
        return None if data is None else Crash.parse(data)

    def reap(self) -> int:
        """Put back the shards (at most 100) whose lease ran out. Returns how many."""
        reaped = self._run("reap", 100)
        self._show_waiting(reaped)
        return len(reaped)

    def announce(self, info: WorkerInfo, ttl_s: int) -> None:
        """Let others see the worker for `ttl_s` seconds."""
        with self.client.pipeline() as pipe:
            pipe.set(Key.worker(info.name), info.dump(), ex=ttl_s)
            pipe.sadd(Key.WORKERS, info.name)
            pipe.execute()

    def retire(self, name: str) -> None:
        """The worker is gone for good."""
        with self.client.pipeline() as pipe:
            pipe.delete(Key.worker(name))
            pipe.srem(Key.WORKERS, name)
            pipe.execute()

    def workers(self) -> list[WorkerInfo]:
        """The workers that were seen lately."""
        names = sorted(name.decode() for name in self.client.smembers(Key.WORKERS))
        infos = self.client.mget([Key.worker(name) for name in names]) if names else []
        if silent := [name for name, info in zip(names, infos, strict=True) if info is None]:
            self.client.srem(Key.WORKERS, *silent)
        return [WorkerInfo.parse(info) for info in infos if info is not None]

    def wanted(self) -> list[ModelRef]:
        """Models with shards ready to be leased."""
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

    def unfinished(self) -> list[BatchStatus]:
        """Sealed batches with rows that have no record yet."""
        return [status for status in self.batches() if status.state is BatchState.RUNNING]

    def shard_states(self, shard_ids: Sequence[str]) -> dict[str, str | None]:
        """Shard id -> "ready", "leased", "done", or None when it is unknown."""
        with self.client.pipeline(transaction=False) as pipe:
            for shard_id in shard_ids:
                pipe.hget(Key.shard(shard_id), "st")
            states = pipe.execute()
        return {
            shard_id: state.decode() if state else None
            for shard_id, state in zip(shard_ids, states, strict=True)
        }

    # -----------------------------------------------------------------------------------------

    def _run(self, operation: str, *args: str | bytes | int | float) -> Any:
        return self._script(keys=[Key.META], args=[operation, *args])

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

    def _seized(
        self, shard_id: str, batch_id: str, owner: str, answer: list[Any], model_key: str
    ) -> Lease:
        epoch, deadline, group, payload = answer
        rows = Shard.unpacked(payload)
        return Lease(
            shard=Shard(id=shard_id, batch_id=batch_id, group=group.decode(), rows=rows),
            epoch=epoch,
            owner=owner,
            deadline_ms=deadline,
            pending=[row.index for row in rows],
            model_key=model_key,
        )

    def _shard_ids(self, batch_id: str) -> Iterator[str]:
        for shard_id in self.client.sscan_iter(Key.shards(batch_id), count=_CHUNK):
            yield shard_id.decode()


def _script_text() -> str:
    """queue.lua behind its names of keys and its constants."""
    names = {
        "leases": Key.LEASES,
        "batches": Key.BATCHES,
        "models": Key.MODELS,
        "meta": Key.META,
        "batch": Key.batch(""),
        "shard": Key.shard(""),
        "runnable": Key.runnable(""),
        "ready": Key.ready(""),
        "shards": Key.shards(""),
        "done": Key.done(""),
        "results": Key.results(""),
        "held": Key.worker_leases(""),
    }
    table = ", ".join(f"{name} = '{key}'" for name, key in names.items())
    head = f"local K = {{ {table} }}\nlocal CRASH, EXPIRY, KEEP_S = {CRASH}, {EXPIRY}, {KEEP_S}\n"
    return head + Path(__file__).with_name("queue.lua").read_text(encoding="utf-8")


def _model(data: bytes) -> ModelRef | None:
    """None for what a newer version wrote and we cannot read."""
    try:
        return ModelRef.parse(data)
    except ValidationError:
        return None


def _status(fields: dict[bytes, bytes]) -> BatchStatus:
    def seconds(name: bytes) -> float | None:
        return int(fields[name]) / 1000 if name in fields else None

    return BatchStatus(
        batch=Batch.parse(fields[b"spec"]).model_copy(update={"total": int(fields[b"total"])}),
        state=BatchState(fields[b"state"].decode()),
        total=int(fields[b"total"]),
        left=int(fields[b"left"]),
        ok=int(fields[b"n_ok"]),
        failed=int(fields[b"n_err"]),
        shards=int(fields[b"shards"]),
        leased=int(fields[b"held"]),
        sealed=seconds(b"sealed"),
        started=seconds(b"started"),
        finished=seconds(b"finished"),
        exported=fields.get(b"exported", b"0-0").decode(),
    )


def _cancelled(row: JobSpec) -> RowResult:
    return RowResult(
        index=row.index,
        custom_id=row.custom_id,
        status=RowStatus.CANCELLED,
        error={
            "code": ErrorCode.BATCH_CANCELLED.value,
            "message": "the batch was cancelled before this row was done",
        },
        metadata=row.metadata,
    )


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":…@") if parts.password else url
