"""The queue as the owner of a batch sees it: upload, look, steer, take the results, forget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from dflash_batch.worker.contract import (
    Batch,
    BatchState,
    BatchStatus,
    ErrorCode,
    JobSpec,
    Key,
    Lease,
    PackedShard,
    RowResult,
    RowStatus,
    Shard,
)
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.leases import WorkerSide
from dflash_batch.worker.side import CHUNK, chunks

_LONGEST_BLOCK_MS = 2000  # below the socket's timeout, or an idle wait would look like an outage
_CANCEL_TTL_MS = 60_000
_CANCEL_SHARDS = 16


class QueueRefused(UserError):
    """Raised when a batch is unknown, sealed or incomplete, and what was sent is not accepted."""

    code: ClassVar[str] = "queue_refused"


class BatchSide(WorkerSide):
    """Operations on batches; a part of `Queue`."""

    # --- upload ------------------------------------------------------------------------------

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
                batch.priority,
                batch.weight,
            )
        )

    def add(self, shards: Sequence[Shard]) -> None:
        """Upload shards of a batch that is not sealed; those that are there already are kept.

        Raises QueueRefused when the batch is unknown or sealed.
        """
        for chunk in chunks(shards, CHUNK):
            self.upload([shard.packed() for shard in chunk])

    def upload(self, shards: Sequence[PackedShard]) -> None:
        """`add` for shards that are packed already; in one pipeline."""
        with self.client.pipeline(transaction=False) as pipe:
            for shard in shards:
                args = ["add", shard.id, shard.batch_id, shard.group, shard.rows, shard.payload]
                self._script(keys=[Key.META], args=args, client=pipe)
            answers = pipe.execute()
        if -1 in answers:
            raise QueueRefused(f"batch {shards[0].batch_id} is unknown or takes no more rows")
        if self.mirror:
            self.mirror.enqueue([shard.id for shard in shards])

    def seal(self, batch_id: str, total: int) -> None:
        """The upload is complete, `total` rows: workers may begin. Raises QueueRefused."""
        answer = self._run("seal", batch_id, total)
        if answer == -1:
            raise QueueRefused(f"batch {batch_id} is unknown")
        if answer == -2:
            raise QueueRefused(f"batch {batch_id} has not all of its {total} rows in the queue")

    # --- look; nothing here changes anything -------------------------------------------------

    def status(self, batch_id: str) -> BatchStatus | None:
        """The batch now, or None when it is unknown."""
        fields = self.client.hgetall(Key.batch(batch_id))
        return _status(fields) if b"spec" in fields else None

    def batches(self) -> list[BatchStatus]:
        """All batches, newest first."""
        ids = self.client.zrevrange(Key.BATCHES, 0, -1)
        found = (self.status(batch_id.decode()) for batch_id in ids)
        return [status for status in found if status is not None]

    def unfinished(self) -> list[BatchStatus]:
        """Batches on whose rows workers may work."""
        return [status for status in self.batches() if status.state is BatchState.RUNNING]

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

    def failures(self, batch_id: str) -> Iterator[tuple[JobSpec, str]]:
        """Rows that failed, each with its error code; not those that were cancelled."""
        codes = {int(row): code.decode() for row, code in self._failed(batch_id).items()}
        for chunk in chunks(list(self._shard_ids(batch_id)), CHUNK):
            with self.client.pipeline(transaction=False) as pipe:
                for shard_id in chunk:
                    pipe.hmget(Key.shard(shard_id), "f", "p")
                for failed, payload in pipe.execute():
                    for row in Shard.unpacked(payload) if failed and payload else ():
                        if row.index in codes:
                            yield row, codes[row.index]

    # --- steer -------------------------------------------------------------------------------

    def acknowledge(self, batch_id: str, stream_id: str) -> None:
        """The records up to `stream_id` are on the client's disk: the queue forgets them."""
        milliseconds, number = stream_id.split("-")
        self._run("acknowledge", batch_id, stream_id, f"{milliseconds}-{int(number) + 1}")

    def pause(self, batch_id: str) -> bool:
        """Lease no more of a batch; rows in hand are finished. False when it does not run."""
        return bool(self._run("turn", batch_id, BatchState.PAUSED.value))

    def resume(self, batch_id: str) -> bool:
        """Lease a paused batch again. False when it is not paused."""
        return bool(self._run("turn", batch_id, BatchState.RUNNING.value))

    def set_priority(self, batch_id: str, priority: int, weight: float | None = None) -> bool:
        """Change who goes first from the next lease on. False when it is unknown or over."""
        return bool(
            self._run("priority", batch_id, priority, "" if weight is None else float(weight))
        )

    def cancel(self, batch_id: str) -> bool:
        """End a batch: rows without a record get one that says `cancelled`.

        False when it is unknown or over. Workers that hold rows of it learn so at their next beat,
        and cannot record them any more.
        """
        if not self._run("cancel", batch_id):
            return False
        status = self.status(batch_id)
        assert status is not None
        owner = f"cancel-{uuid4().hex}"
        while seized := self._seize(status, owner, [], _CANCEL_SHARDS):
            self._end_seized(seized)
        for chunk in chunks(list(self._shard_ids(batch_id)), CHUNK):
            states = self.shard_states(chunk)
            rest = [shard_id for shard_id in chunk if states[shard_id] != "done"]
            for few in chunks(rest, _CANCEL_SHARDS):
                self._end_seized(self._seize(status, owner, few, 0))
            if self.mirror:
                self.mirror.end(chunk)
        return True

    def forget(self, batch_id: str) -> None:
        """Delete all that is stored of a batch, RQ's jobs included."""
        self._run("cancel", batch_id)  # so that nobody leases what is going away
        for chunk in chunks(list(self._shard_ids(batch_id)), CHUNK):
            self._run("drop", batch_id, *chunk)
            self.client.delete(*(Key.crash(shard_id) for shard_id in chunk))
            if self.mirror:
                self.mirror.forget(chunk)
        self._run("forget", batch_id)

    def bytes_of(self, batch_id: str) -> int:
        """Memory that the results and shards of a batch take, by a sample of them."""
        size = self.client.memory_usage
        total = sum(int(size(key(batch_id)) or 0) for key in (Key.results, Key.done, Key.failed))
        count = int(self.client.scard(Key.shards(batch_id)))
        sample = self.client.srandmember(Key.shards(batch_id), 20)
        each = [int(size(Key.shard(shard_id.decode())) or 0) for shard_id in sample]
        return total + (sum(each) * count // len(each) if each else 0)

    # -----------------------------------------------------------------------------------------

    def _failed(self, batch_id: str) -> dict[bytes, bytes]:
        failed: dict[bytes, bytes] = self.client.hgetall(Key.failed(batch_id))
        return failed

    def _seize(
        self, status: BatchStatus, owner: str, shard_ids: Sequence[str], most: int
    ) -> list[Lease]:
        batch = status.batch
        seized = self._run("seize", batch.id, owner, _CANCEL_TTL_MS, most, *shard_ids)
        return [
            Lease(
                shard=Shard(
                    id=shard_id.decode(),
                    batch_id=batch.id,
                    group=group.decode(),
                    rows=Shard.unpacked(payload),
                ),
                epoch=epoch,
                owner=owner,
                deadline_ms=deadline,
                pending=[],
                model_key=batch.model.key,
            )
            for shard_id, epoch, deadline, group, payload in seized
        ]

    def _end_seized(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.commit(lease, [_cancelled(row) for row in lease.shard.rows])

    def _shard_ids(self, batch_id: str) -> Iterator[str]:
        for shard_id in self.client.sscan_iter(Key.shards(batch_id), count=CHUNK):
            yield shard_id.decode()


def _status(fields: dict[bytes, bytes]) -> BatchStatus:
    def number(name: bytes, default: Any = 0) -> Any:
        return type(default)(fields.get(name, default))

    def seconds(name: bytes) -> float | None:
        return int(fields[name]) / 1000 if name in fields else None

    return BatchStatus(
        batch=Batch.parse(fields[b"spec"]).model_copy(update={"total": number(b"total")}),
        state=BatchState(fields[b"st"].decode()),
        total=number(b"total"),
        left=number(b"left"),
        ok=number(b"n_ok"),
        failed=number(b"n_err"),
        shards=number(b"shards"),
        leased=number(b"held"),
        priority=number(b"prio"),
        weight=number(b"weight", 1.0),
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
