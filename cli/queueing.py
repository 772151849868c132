"""The queue as the verbs see it: opened for a while, and a batch in it by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis

from dflash_batch.cli.common import Common
from dflash_batch.worker.contract import BatchStatus, WorkerInfo
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.home import home_dir
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.server import redis_url

LAST = "@last"

_PREFIX = "batch_"


class BatchNotFound(UserError):
    """Raised when a name fits no batch of the queue, or several."""

    code = "batch_not_found"


class WorkerNotFound(UserError):
    """Raised when a name fits no worker of the queue, or several."""

    code = "worker_not_found"


class QueueFailed(UserError):
    """Raised when the queue stops answering in mid-command."""

    code = "queue_unreachable"


@contextmanager
def open_queue(common: Common) -> Iterator[Queue]:
    """The queue of --redis or of the home. Raises UserError of server.py and queue.py."""
    with redis_url(common.redis, home_dir(common.home), insecure=common.insecure) as url:
        client = connect(url)
        try:
            yield Queue(client)
        except redis.RedisError as error:
            raise QueueFailed(f"the queue failed: {error}") from error
        finally:
            client.close()


def find_batch(queue: Queue, name: str) -> BatchStatus:
    """A batch by its id, by the beginning of its id, or @last. Raises BatchNotFound."""
    batches = queue.batches()
    if name == LAST:
        if not batches:
            raise BatchNotFound("there is no batch in the queue")
        return batches[0]
    wanted = name if name.startswith(_PREFIX) else _PREFIX + name
    found = [status for status in batches if status.batch.id.startswith(wanted)]
    exact = [status for status in found if status.batch.id == wanted]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        ids = ", ".join(status.batch.id for status in found[:5])
        raise BatchNotFound(f"{name} fits several batches: {ids}")
    raise BatchNotFound(
        f"no batch {name} in this queue; dflash-batch status lists them. What `run` has finished "
        "is in its output file"
    )


def find_worker(workers: Sequence[WorkerInfo], name: str) -> WorkerInfo:
    """A worker by its name or the beginning of it. Raises WorkerNotFound."""
    found = [info for info in workers if info.name.startswith(name)]
    exact = [info for info in found if info.name == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        names = ", ".join(info.name for info in found[:5])
        raise WorkerNotFound(f"{name} fits several workers: {names}")
    raise WorkerNotFound(f"no worker {name} is up; dflash-batch worker ls lists them")
