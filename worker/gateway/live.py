"""Live requests: each is a batch of one row, and its caller waits for the row's record.

One thread talks to the queue for all of them, so a thousand callers cost one connection, and a
caller that is slow or gone holds up nobody.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import redis

from dflash_batch.worker.contract import (
    TOP_PRIORITY,
    Batch,
    JobSpec,
    Key,
    ModelRef,
    RowResult,
    Shard,
)
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.gateway.errors import ApiError
from dflash_batch.worker.log import warn
from dflash_batch.worker.queue import Queue, QueueUnreachable, connect

MOST = 4096
"""Callers that may wait at once; more are told to come again."""

SUBMIT_AT_ONCE = 64
"""Rows queued between two looks for records."""

LOOK_MS = 50
"""How long one look for records may take: also how late a new row is seen when there are others."""

LINGER_S = 5.0
"""How long an answered batch stays in the queue: its worker may still be putting it away."""


@dataclass(eq=False)
class _Call:
    """A caller that waits."""

    row: JobSpec
    model: ModelRef
    batch_id: str
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[RowResult] = field(init=False)

    def __post_init__(self) -> None:
        self.answer = self.loop.create_future()

    def tell(self, outcome: RowResult | Exception) -> None:
        """Hand over the outcome, from any thread."""
        self.loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: RowResult | Exception) -> None:
        if self.answer.done():
            return  # the caller has gone
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class Desk:
    """Takes rows from callers and gives records back."""

    def __init__(self, url: str, home: Path, revive: Callable[[], None] = lambda: None) -> None:
        """`home` tells our batches from those of another gateway on the same queue."""
        mark = hashlib.sha256(str(home).encode()).digest()
        self._prefix = f"batch_live{base64.b32encode(mark).decode().lower()[:6]}"
        self._url = url
        self._revive = revive
        self._new: SimpleQueue[_Call] = SimpleQueue()
        self._gone: SimpleQueue[str] = SimpleQueue()
        self._waiting: dict[str, _Call] = {}
        self._old: deque[tuple[float, str]] = deque()  # answered: when to forget it
        self._callers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live")

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End; who still waits is told so."""
        self._stop.set()
        self._thread.join()

    @property
    def callers(self) -> int:
        """How many wait now."""
        return self._callers

    async def ask(self, row: JobSpec, model: ModelRef) -> RowResult:
        """The record of a row. A cancelled wait takes the row out of the queue.

        Raises ApiError when too many wait or the queue is away.
        """
        if self._callers >= MOST:
            raise ApiError(429, f"{MOST:,} requests wait already", code="too_many_requests")
        name = base64.b32encode(uuid.uuid4().bytes).decode().lower()[:20]
        call = _Call(row, model, self._prefix + name, asyncio.get_running_loop())
        self._callers += 1
        self._new.put(call)
        try:
            return await call.answer
        finally:
            self._callers -= 1
            self._gone.put(call.batch_id)

    def _run(self) -> None:
        queue: Queue | None = None
        while not self._stop.is_set():
            try:
                if queue is None:
                    queue = Queue(connect(self._url))
                    self._sweep(queue)
                self._turn(queue)
            except (redis.RedisError, QueueUnreachable) as error:
                warn("queue_away", reason=str(error))
                self._refuse_all(ApiError(503, "the queue is away", code="queue_unreachable"))
                try:
                    self._revive()
                except UserError as trouble:
                    warn("queue_lost", reason=str(trouble))
                self._stop.wait(0.5)
        self._refuse_all(ApiError(503, "the server stops", code="shutting_down"))
        if queue is not None:
            queue.client.close()

    def _turn(self, queue: Queue) -> None:
        self._take(queue)
        self._look(queue)
        while not self._gone.empty():
            batch_id = self._gone.get()
            if self._waiting.pop(batch_id, None) is not None:
                queue.cancel(batch_id)  # its caller left
            self._old.append((time.monotonic() + LINGER_S, batch_id))
        while self._old and self._old[0][0] < time.monotonic():
            queue.forget(self._old.popleft()[1])

    def _take(self, queue: Queue) -> None:
        """Queue the rows of new callers; without any caller, wait for one."""
        for number in range(SUBMIT_AT_ONCE):
            is_idle = number == 0 and not self._waiting
            try:
                call = self._new.get(timeout=LOOK_MS / 1000) if is_idle else self._new.get_nowait()
            except Empty:
                return
            if call.answer.cancelled():
                continue
            self._waiting[call.batch_id] = call
            queue.create(
                Batch(
                    id=call.batch_id,
                    model=call.model,
                    name="live",
                    created=time.time(),
                    priority=TOP_PRIORITY,
                )
            )
            queue.add([Shard(id=f"{call.batch_id}-0", batch_id=call.batch_id, rows=[call.row])])
            queue.seal(call.batch_id, 1)

    def _look(self, queue: Queue) -> None:
        """Give out the records that are there."""
        if not self._waiting:
            return
        names = {Key.results(batch_id).encode(): batch_id for batch_id in self._waiting}
        block = LOOK_MS if self._new.empty() else None
        found = queue.client.xread(dict.fromkeys(names, "0-0"), block=block)
        for stream, entries in found or []:
            call = self._waiting.pop(names[stream])
            call.tell(RowResult.unpacked(entries[0][1][b"r"]))

    def _refuse_all(self, error: ApiError) -> None:
        while not self._new.empty():
            call = self._new.get()
            self._waiting[call.batch_id] = call
        for call in self._waiting.values():
            call.tell(error)
        self._waiting.clear()

    def _sweep(self, queue: Queue) -> None:
        """Remove what callers of an earlier life left."""
        for status in queue.batches():
            if status.batch.id.startswith(self._prefix) and status.batch.id not in self._waiting:
                queue.forget(status.batch.id)
