"""What a supervisor shows RQ: a worker in its list, that obeys its commands and runs no job.

RQ's own loop, forks, threads and clean-up are not used.
"""

from __future__ import annotations

from typing import Any

import redis

from dflash_batch.worker.contract import Key
from dflash_batch.worker.mirror import BaseWorker, JSONSerializer, WorkerStatus, is_suspended

_ABANDONED_NEVER_S = 7 * 86400
_SHOWN_S = 60  # RQ lists a worker this long (and a minute more) after its last sign


class RqFace(BaseWorker):
    """An RQ worker that leaves the work to its subclass."""

    def __init__(self, name: str, client: redis.Redis) -> None:
        super().__init__(
            [Key.QUEUE],
            name=name,
            connection=client,
            serializer=JSONSerializer,
            worker_ttl=_SHOWN_S,
        )

    @property
    def connection_timeout(self) -> int:
        """Our client keeps its own: RQ would make it minutes, for blocking calls we never make."""
        return 0

    def appear_in_rq(self) -> None:
        self.register_birth()
        self.set_state(WorkerStatus.STARTED)
        self.subscribe()

    def hear_rq(self) -> bool:
        """Give a sign of life and obey what RQ has sent. Returns whether work is suspended."""
        if not self.connection.hexists(self.key, "birth"):
            # the server came back empty, or we slept past our time; a piece may have been written
            self.connection.delete(self.key)
            self.register_birth()
        if self.pubsub is None:  # the queue was away when we came
            self.subscribe()
        suspended = bool(is_suspended(self.connection, self))
        if self.pubsub is not None:
            while message := self.pubsub.get_message(ignore_subscribe_messages=True, timeout=0):
                self.handle_payload(message)
        return suspended

    def subscribe(self) -> None:
        """Listen for commands without a thread: `hear_rq` reads them."""
        self.pubsub = self.connection.pubsub()
        self.pubsub.subscribe(self.pubsub_channel_name)

    def unsubscribe(self) -> None:
        if self.pubsub is not None:
            self.pubsub.close()
            self.pubsub = None

    def execute_job(self, job: Any, queue: Any) -> None:
        raise NotImplementedError("rows run in the engine, not job by job")

    def clean_registries(self) -> None:
        """Nothing: leases run out in lease.lua, and RQ's clean-up would call shards abandoned."""

    def get_heartbeat_ttl(self, job: Any, working_time: float = 0.0) -> int:
        """Long, so that nobody who looks at RQ's registries judges our shards."""
        return _ABANDONED_NEVER_S
