"""Connections to the queue, handed out one at a time: a `Queue` is not for several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, LifoQueue

from dflash_batch.worker.queue import Queue, connect


class Pool:
    """Opens connections as they are needed and keeps them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: LifoQueue[Queue] = LifoQueue()

    @contextmanager
    def queue(self) -> Iterator[Queue]:
        """A queue for the caller alone. Raises QueueUnreachable."""
        try:
            queue = self._idle.get_nowait()
        except Empty:
            queue = Queue(connect(self._url))
        try:
            yield queue
        finally:
            self._idle.put(queue)

    def close(self) -> None:
        """Close all that are idle."""
        while not self._idle.empty():
            self._idle.get_nowait().client.close()
