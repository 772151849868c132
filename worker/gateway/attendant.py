"""A worker of the server's own, kept alive beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import redis

from dflash_batch.worker.errors import UserError
from dflash_batch.worker.log import say, warn
from dflash_batch.worker.private import PrivateWorker

LOOK_S = 0.5
"""Seconds between looks at the worker."""


class Attendant:
    """Looks after a worker in a thread; `on_failure` is called when it cannot be kept up."""

    def __init__(self, worker: PrivateWorker, on_failure: Callable[[], None]) -> None:
        self.failure: UserError | None = None  # why it cannot
        self._worker = worker
        self._on_failure = on_failure
        self._stop = threading.Event()
        self._rows: dict[str, int] = {}  # rows done, by the name of each life
        self._thread = threading.Thread(target=self._run, name="attendant")

    def start(self) -> None:
        """Start the worker, and again whenever it dies."""
        self._thread.start()

    def stop(self) -> None:
        """End worker and thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if news := self._worker.watch(self._rows_done()):
                    say("worker", news=news)
                self._stop.wait(LOOK_S)
        except UserError as error:
            self.failure = error
            warn("worker_lost", reason=str(error))
            self._on_failure()
        finally:
            self._worker.stop()

    def _rows_done(self) -> int:
        with suppress(redis.RedisError):  # away: what it last said counts
            self._rows |= {info.name: info.rows_done for info in self._worker.queue.workers()}
        return sum(self._rows.values())
