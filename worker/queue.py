"""The queue: what producers and workers say to Redis. The rules themselves are in scripts/.

All names of keys come from contract.py. Time is the server's. Every call may be repeated: after a
lost answer the second one finds the work done.
"""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import OutOfMemoryError, ResponseError
from redis.retry import Retry

from dflash_batch.worker.address import tls_options
from dflash_batch.worker.batches import BatchSide, QueueRefused
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.leases import COMMIT_ROWS, Committed, WorkerSide
from dflash_batch.worker.mirror import Mirror
from dflash_batch.worker.scripts import CRASH, EXPIRY, KEEP_S, script_text

__all__ = [
    "COMMIT_ROWS",
    "CRASH",
    "EXPIRY",
    "KEEP_S",
    "Committed",
    "Queue",
    "QueueRefused",
    "QueueUnreachable",
    "connect",
    "is_outage",
]

_TIMEOUT_S = 5.0


class QueueUnreachable(UserError):
    """Raised when no server answers at the queue's address."""

    code: ClassVar[str] = "queue_unreachable"


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


class Queue(BatchSide, WorkerSide):
    """The queue on one client. Not for use by several threads at once."""

    def __init__(self, client: redis.Redis, *, mirror: bool = True) -> None:
        self.client: Any = client  # redis-py's types leave open whether answers are decoded
        self.mirror = Mirror(client) if mirror else None
        self._view = self.mirror.waiting_list if self.mirror else ""
        self._script = client.register_script(script_text())


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":…@") if parts.password else url
