"""Putting a batch into the queue: plan, upload, seal. May be repeated after any interruption."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from dflash_batch.worker.contract import (
    Batch,
    BatchState,
    BatchStatus,
    JobSpec,
    ModelRef,
    PackedShard,
)
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.prefix import plan
from dflash_batch.worker.queue import Queue

CHUNK = 64
"""Shards sent in one pipeline."""

Progress = Callable[[int, int], Any]
"""Told (rows sent, rows in all) after each chunk."""


class BatchLost(UserError):
    """Raised when the queue forgets a batch while it is being uploaded."""

    code = "batch_lost"


def batch_id_for(input_digest: str, model: ModelRef, salt: str = "") -> str:
    """The id of a batch, "batch_" and 26 characters: the same input and model, the same id.

    That makes submitting twice harmless. A `salt` tells apart what must be run separately.
    """
    text = json.dumps([input_digest, model.key, salt])
    digest = hashlib.sha256(text.encode()).digest()
    return "batch_" + base64.b32encode(digest).decode().lower()[:26]


def retry(
    queue: Queue, status: BatchStatus, codes: Collection[str] = (), *, salt: str = ""
) -> BatchStatus | None:
    """Queue the failed rows of a batch that is over as a batch of their own.

    `codes`: only those that failed with one of these; all when empty. The same call gives the same
    batch. None when there is no such row. Cancelled rows have not failed.
    """
    old = status.batch
    failed = sorted(
        (row for row, code in queue.failures(old.id) if not codes or code in codes),
        key=lambda row: row.index,
    )
    if not failed:
        return None
    which = ",".join(str(row.index) for row in failed)
    rows = [row.model_copy(update={"index": at}) for at, row in enumerate(failed)]
    return submit(
        queue,
        rows,
        old.model,
        batch_id=batch_id_for(f"{old.id} {which}", old.model, salt),
        name=old.name,
        priority=status.priority,
    )


class Planned(Protocol):
    """A batch that is cut: `Plan` in memory, or `SpoolPlan` on disk."""

    @property
    def rows(self) -> int: ...

    def packed(self, batch_id: str) -> Iterator[PackedShard]: ...


def submit(
    queue: Queue,
    rows: Sequence[JobSpec],
    model: ModelRef,
    *,
    batch_id: str,
    name: str,
    progress: Progress = lambda done, total: None,
    planned: Planned | None = None,
    priority: int = 0,
) -> BatchStatus:
    """Put `rows` into the queue as batch `batch_id`, and seal it so that workers may take it.

    An upload that was interrupted is continued, a sealed batch is left as it is. `planned` saves
    planning again. Raises BatchLost.
    """
    created = queue.create(
        Batch(id=batch_id, model=model, name=name, created=time.time(), priority=priority)
    )
    status = None if created else queue.status(batch_id)
    if status is not None and status.state is not BatchState.UPLOADING:
        return status
    cut = planned or plan(rows)
    sent = 0
    shards = cut.packed(batch_id)
    while chunk := list(islice(shards, CHUNK)):
        queue.upload(chunk)
        sent += sum(shard.rows for shard in chunk)
        progress(sent, cut.rows)
    queue.seal(batch_id, cut.rows)
    sealed = queue.status(batch_id)
    if sealed is None:
        raise BatchLost(
            f"the queue lost {batch_id} while it was uploaded: was it emptied? Submit it again."
        )
    return sealed
