"""Putting a batch into the queue: plan, upload, seal. May be repeated after any interruption."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from dflash_batch.worker.contract import Batch, BatchState, BatchStatus, JobSpec, ModelRef
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.prefix import Plan, plan
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


def submit(
    queue: Queue,
    rows: Sequence[JobSpec],
    model: ModelRef,
    *,
    batch_id: str,
    name: str,
    progress: Progress = lambda done, total: None,
    planned: Plan | None = None,
) -> BatchStatus:
    """Put `rows` into the queue as batch `batch_id`, and seal it so that workers may take it.

    An upload that was interrupted is continued, a sealed batch is left as it is. `planned` saves
    planning again. Raises BatchLost.
    """
    created = queue.create(Batch(id=batch_id, model=model, name=name, created=time.time()))
    status = None if created else queue.status(batch_id)
    if status is not None and status.state is not BatchState.UPLOADING:
        return status
    cut = planned or plan(rows)
    sent = 0
    shards = cut.shards(batch_id)
    while chunk := list(islice(shards, CHUNK)):
        queue.add(chunk)
        sent += sum(len(shard.rows) for shard in chunk)
        progress(sent, cut.rows)
    queue.seal(batch_id, cut.rows)
    sealed = queue.status(batch_id)
    if sealed is None:
        raise BatchLost(
            f"the queue lost {batch_id} while it was uploaded: was it emptied? Submit it again."
        )
    return sealed
