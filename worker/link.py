"""The link to Redis as a long-lived worker sees it: outages pass, the worker stays."""

from __future__ import annotations

import time
from types import TracebackType

import redis

from dflash_batch.worker.log import say, warn
from dflash_batch.worker.queue import is_outage

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


class Link:
    """`if link.up: with link: …` runs calls to Redis and sits out its errors, with growing pauses.

    What is no outage (a permission taken away, a key of a stranger) is for a person to put right;
    it is said as such, and the worker is there when that has been done.
    """

    def __init__(self) -> None:
        self._lost_at: float | None = None
        self._wait_s = _FIRST_WAIT_S
        self._try_at = 0.0

    @property
    def up(self) -> bool:
        """Whether it is time to talk to the server."""
        return time.monotonic() >= self._try_at

    @property
    def lost(self) -> bool:
        return self._lost_at is not None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            if self._lost_at is not None:
                say("queue_back", seconds=time.monotonic() - self._lost_at)
                self._lost_at = None
                self._wait_s = _FIRST_WAIT_S
            return False
        if not isinstance(error, redis.RedisError):
            return False
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            warn("queue_away" if is_outage(error) else "queue_refuses", error=error)
        self._try_at = time.monotonic() + self._wait_s
        self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)
        return True
