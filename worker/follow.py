"""Following one batch to its end: results into files, a worker kept alive, outages sat out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from dflash_batch.worker.contract import BatchStatus, WorkerInfo
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.private import PrivateWorker
from dflash_batch.worker.progress import Reporter
from dflash_batch.worker.queue import Queue, is_outage
from dflash_batch.worker.results import ResultFiles, Tail
from dflash_batch.worker.server import EmbeddedServer

PULL_MS = 200
"""How long one look for results may take: also how late Ctrl-C is seen."""

LOOK_S = 0.5
"""Seconds between looks at the batch and the worker."""

PAUSE_S = 0.5
"""Seconds between attempts to reach a queue that does not answer."""


class QueueLost(UserError):
    """Raised when the queue fails in a way that waiting does not cure, or loses rows for good."""

    code = "queue_unreachable"


@dataclass
class Follower:
    """Brings the results of one batch to disk while a private worker makes them."""

    queue: Queue
    server: EmbeddedServer | None  # None: somebody else looks after the server
    batch_id: str
    files: ResultFiles
    worker: PrivateWorker
    report: Reporter
    stop: threading.Event
    on_look: Callable[[], None] = lambda: None  # called every LOOK_S
    _tail: Tail = field(init=False)
    _status: BatchStatus | None = field(default=None, init=False)
    _info: WorkerInfo | None = field(default=None, init=False)
    _looked: float = field(default=0.0, init=False)
    _is_out: bool = field(default=False, init=False)

    def run(self, goal: int) -> None:
        """Until `goal` rows are written in all, or the queue has no more to give.

        All that was written is on disk and acknowledged afterwards, and the worker has ended.
        Raises KeyboardInterrupt if `stop` was set before that; OutputFailed, QueueLost,
        ModelUnavailable and WorkerFailed.
        """
        self._look()
        after = self._status.exported if self._status else "0-0"
        self._tail = Tail(self.queue, self.batch_id, self.files, after)
        try:
            while len(self.files.written) < goal and not self.stop.is_set():
                try:
                    if not self._step():
                        break
                    self._is_out = False
                except redis.RedisError as error:
                    self._sit_out(error)
        finally:
            self.worker.stop()
        self._drain()
        if self.stop.is_set() and len(self.files.written) < goal:
            raise KeyboardInterrupt

    def _step(self) -> bool:
        """One turn. False when the stream is at its end for good."""
        was_over = self._status is None or self._status.done
        taken = self._tail.pull(PULL_MS)
        if was_over and not taken:
            return False
        if time.monotonic() - self._looked > LOOK_S or not self.worker.is_running:
            self._look()
        if self._status is None:
            self.report.note("the queue lost the batch; rows not written yet are queued again")
        elif not self._status.done:
            news = self.worker.watch(len(self.files.written))
            if news:
                self.report.note(news)
        self._show()
        return True

    def _look(self) -> None:
        self._looked = time.monotonic()
        self.on_look()
        self._status = self.queue.status(self.batch_id)
        infos = {info.name: info for info in self.queue.workers()}
        self._info = infos.get(self.worker.name)

    def _show(self) -> None:
        if not self.worker.is_ready:
            self.report.loading(self.worker.loaded)
        elif self._info is not None:
            self.report.running(self._info.active, self._info.tokens_per_s)
        else:
            self.report.running(0, 0.0)

    def _sit_out(self, error: redis.RedisError) -> None:
        """Wait a little for a queue that is away; start our own again. Other errors are raised."""
        if not is_outage(error):
            raise error
        if not self._is_out:
            self._is_out = True
            self.report.note(f"the queue does not answer ({error}); trying again")
        if self.server is not None:
            before = self.server.url
            self.server.ensure()
            if self.server.url != before:
                raise QueueLost("the queue's socket had to move. Run the same command again.")
        self.stop.wait(PAUSE_S)

    def _drain(self) -> None:
        """Take what the worker recorded last, and bring everything to disk."""
        try:
            while self._tail.pull(0):
                pass
            self._tail.settle()
        except redis.RedisError as error:
            # On disk it is: `settle` syncs first. What was not acknowledged is sent again.
            self.report.note(f"the queue did not take the acknowledgement ({error})")
            self.files.sync()
