"""Does what batches wait for: reads their files, queues them, and brings results to disk.

Two threads: one reads and queues, which takes long for a large file, the other follows all that
run. Both may die with the process at any point: the records on disk say where to go on.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis

from dflash_batch.worker.contract import ErrorCode, JobSpec, RowResult, RowStatus
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.gateway.batches import Batches, BatchRecord, Status
from dflash_batch.worker.gateway.files import Files
from dflash_batch.worker.gateway.intake import read_batch
from dflash_batch.worker.log import warn
from dflash_batch.worker.queue import Queue, QueueUnreachable, connect
from dflash_batch.worker.reader import InputError, Reading
from dflash_batch.worker.results import ResultFiles, Tail
from dflash_batch.worker.submit import submit

TICK_S = 0.05
"""How late new results and new orders are seen."""

PAUSE_S = 0.5
"""Between attempts after something failed that may pass: the queue is away, the disk is full."""

MOST_ERRORS = 1000
"""Bad lines told of in a batch object."""

Turn = Callable[[Queue, BatchRecord], bool]


class _DatedFiles(ResultFiles):
    """Result files of a batch whose rows, if it ends early, were not cancelled but too late."""

    is_late = False

    def write(self, results: Sequence[RowResult]) -> int:
        return super().write([_expired(r) for r in results] if self.is_late else results)


@dataclass
class _Running:
    """A batch in the queue, and the files its results go to."""

    files: _DatedFiles
    tail: Tail
    is_ended: bool = False  # early, by us
    was_over: bool = False  # before the last look for results


class Clerk:
    """The work behind the batches. `revive` may bring a server of our own back."""

    def __init__(
        self,
        batches: Batches,
        files: Files,
        url: str,
        revive: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches = batches
        self._files = files
        self._url = url
        self._revive = revive
        self._stop = threading.Event()
        self._running: dict[str, _Running] = {}
        self._threads = [
            threading.Thread(target=self._keep_on, args=turn, name=f"clerk-{turn[0]}")
            for turn in (("admit", self._admit), ("follow", self._follow))
        ]

    def start(self) -> None:
        """Take up what is to be done."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; results taken from the queue are on disk then."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for running in self._running.values():
            running.files.sync()
            running.files.close()

    def progress(self, record: BatchRecord) -> BatchRecord:
        """The record with the counts of this moment."""
        running = self._running.get(record.id)
        if running is None or record.is_over:
            return record
        return record.model_copy(update=_counts(running.files))

    def _keep_on(self, name: str, turn: Turn) -> None:
        """Give every batch its turn, again and again; trouble with one does not stop others."""
        queue: Queue | None = None
        while not self._stop.wait(TICK_S):
            for record in sorted(self._batches.shelf.all(), key=lambda r: r.created_at):
                if record.is_over or self._stop.is_set():
                    continue
                try:
                    queue = queue or Queue(connect(self._url))
                    while turn(queue, record) and not self._stop.is_set():
                        pass
                except (redis.RedisError, QueueUnreachable) as error:
                    self._sit_out(error)
                except InputError as error:
                    self._fail(record, str(error), ErrorCode.INVALID_VALUE)
                except UserError as error:  # of queue or files: what is written stays right
                    warn("batch_waits", batch=record.id, reason=str(error))
                    self._stop.wait(PAUSE_S)
                except Exception as error:  # the thread has other batches to look after
                    # where, not what: the text of an error may hold a prompt
                    where = "".join(traceback.format_tb(error.__traceback__))
                    warn("batch_failed", batch=record.id, trace=where)
                    self._fail(record, f"internal error: {type(error).__name__}")
        if queue is not None:
            queue.client.close()

    def _sit_out(self, error: Exception) -> None:
        warn("queue_away", reason=str(error))
        try:
            self._revive()
        except UserError as trouble:
            warn("queue_lost", reason=str(trouble))
        self._stop.wait(PAUSE_S)

    # --- into the queue ----------------------------------------------------------------------

    def _admit(self, queue: Queue, record: BatchRecord) -> bool:
        """Read and queue a batch that is not queued."""
        if record.in_progress_at is not None:
            return False
        if record.status == "cancelling":
            self._end(record, "cancelled")
            return False
        reading = self._read(record)
        if reading.errors:
            errors = [
                {"code": e.code.value, "message": e.message, "param": e.param, "line": e.line}
                for e in reading.errors[:MOST_ERRORS]
            ]
            self._end(record, "failed", errors=errors, total=reading.requests)
            return False
        _queue_rows(queue, record, reading.rows)
        shelf = self._batches.shelf
        with shelf.lock:
            now = shelf.get(record.id)
            # One that is to be cancelled keeps that status: the other thread sees to it.
            status = "cancelling" if now and now.status == "cancelling" else "in_progress"
            begun = int(time.time())
            shelf.change(record.id, status=status, in_progress_at=begun, total=len(reading.rows))
        return False

    def _read(self, record: BatchRecord) -> Reading:
        path = self._files.path(record.input_file_id)
        return read_batch(path, record.endpoint, record.model)

    # --- out of the queue --------------------------------------------------------------------

    def _follow(self, queue: Queue, record: BatchRecord) -> bool:
        """Take results of a batch that is queued. False when there are no more for now."""
        if record.in_progress_at is None:
            return False
        running = self._running.get(record.id) or self._open(queue, record)
        if not running.is_ended:
            running.is_ended = self._end_early(queue, record, running)
        status = queue.status(record.id)
        taken = running.tail.pull(0)
        if not taken and running.was_over:
            running.tail.settle()
            self._finish(queue, record, running)
            return False
        running.was_over = status is None or status.done
        return bool(taken) or running.was_over

    def _open(self, queue: Queue, record: BatchRecord) -> _Running:
        """The files of a batch, and rows queued again that neither they nor the queue have."""
        rows = self._read(record).rows
        files = _DatedFiles(
            self._files.path(record.output_id("out")),
            self._files.path(record.output_id("err")),
            batch_id=record.id,
            rows={row.custom_id: row.index for row in rows},
        )
        try:
            status = queue.status(record.id)
            missing = [row for row in rows if row.index not in files.written]
            if missing and (
                status is None or (status.done and not queue.results(record.id, "0-0", 1, 0))
            ):
                queue.forget(record.id)
                _queue_rows(queue, record, missing)
                status = None
            tail = Tail(queue, record.id, files, status.exported if status else "0-0")
        except BaseException:
            files.close()
            raise
        running = self._running[record.id] = _Running(files, tail)
        return running

    def _end_early(self, queue: Queue, record: BatchRecord, running: _Running) -> bool:
        """End a batch that is cancelled or too late."""
        running.files.is_late = record.cancelling_at is None and time.time() > record.expires_at
        if record.cancelling_at is None and not running.files.is_late:
            return False
        queue.cancel(record.id)
        return True

    def _finish(self, queue: Queue, record: BatchRecord, running: _Running) -> None:
        missing = running.files.totals.requests - len(running.files.written)
        if missing:
            # The queue lost rows, or somebody took them: open again, which queues them again.
            warn("rows_missing", batch=record.id, rows=missing)
            running.files.close()
            del self._running[record.id]
            return
        running.files.finish()
        counts = _counts(running.files)
        ids: dict[str, str] = {}
        for kind, name in (("out", "output_file_id"), ("err", "error_file_id")):
            file_id = record.output_id(kind)  # type: ignore[arg-type]
            if self._files.path(file_id).exists() and self._files.path(file_id).stat().st_size:
                self._files.enter(file_id, f"{record.id}_{name[:-8]}.jsonl", "batch_output")
                ids[name] = file_id
        ended: Literal["cancelled", "expired", "completed"] = "completed"
        if running.is_ended:
            ended = "expired" if running.files.is_late else "cancelled"
        self._end(record, ended, finalizing_at=int(time.time()), **counts, **ids)
        running.files.close()
        del self._running[record.id]
        queue.forget(record.id)

    def _fail(
        self, record: BatchRecord, message: str, code: ErrorCode = ErrorCode.INTERNAL_ERROR
    ) -> None:
        error = {"code": code.value, "message": message, "param": None, "line": None}
        self._end(record, "failed", errors=[error])

    def _end(self, record: BatchRecord, status: Status, **facts: Any) -> None:
        now = int(time.time())
        self._batches.shelf.change(record.id, status=status, **{f"{status}_at": now}, **facts)


def _queue_rows(queue: Queue, record: BatchRecord, rows: Sequence[JobSpec]) -> None:
    submit(
        queue,
        rows,
        record.ref,
        batch_id=record.id,
        name=record.input_file_id,
        priority=record.priority,
    )


def _counts(files: ResultFiles) -> dict[str, int]:
    totals = files.totals
    return {
        "completed": totals.ok,
        "failed": totals.failed,
        "input_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "output_tokens": totals.completion_tokens,
        "reasoning_tokens": totals.reasoning_tokens,
    }


def _expired(result: RowResult) -> RowResult:
    if result.status is not RowStatus.CANCELLED:
        return result
    error = {"code": ErrorCode.BATCH_EXPIRED.value, "message": "not done before the deadline"}
    return result.model_copy(update={"error": error})
