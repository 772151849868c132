"""Batches as the API shows them, and which request made which."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import uuid
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflash_batch.worker.contract import Endpoint, ModelRef
from dflash_batch.worker.gateway.disk import Named, Shelf
from dflash_batch.worker.gateway.errors import ApiError

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
OVER = ("failed", "completed", "expired", "cancelled")

SAME_S = 60.0
"""Within this time the same request without a key is taken for the SDK's retry of a lost answer."""

_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


class BatchRecord(Named):
    """A batch of the gateway. It has the same id in the queue; times are Unix seconds."""

    endpoint: Endpoint
    model: str | None = None  # as the lines name it
    ref: ModelRef
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    metadata: dict[str, str] | None = None
    key: str | None = None  # of idempotency, as the caller gave it
    priority: int = 0  # when it was made
    asked: str = ""  # hash of what was asked for

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def output_id(self, kind: Literal["out", "err"]) -> str:
        """Id of the file of results or of errors; shown once the file can be fetched."""
        return f"file-{hashlib.sha256(f'{self.id}/{kind}'.encode()).hexdigest()[:32]}"

    def shown(self) -> dict[str, Any]:
        """The batch object of the API."""
        own = {"ref", "priority", "total", "completed", "failed", "key", "asked", "errors"}
        own |= {"input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"}
        errors = None if self.errors is None else {"object": "list", "data": self.errors}
        return self.model_dump(exclude=own) | {
            "object": "batch",
            "errors": errors,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "dflash": {"state": self.status, "priority": self.priority},
        }


class Asked(NamedTuple):
    """What a request for a batch says, checked."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str
    seconds: int
    metadata: dict[str, str] | None
    priority: int = 0

    @property
    def digest(self) -> str:
        """The same for the same request."""
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).hexdigest()


class Batches:
    """All batches of the gateway."""

    def __init__(self, folder: Path) -> None:
        self.shelf = Shelf(folder, BatchRecord)

    def earlier(self, asked: Asked, key: str | None) -> BatchRecord | None:
        """The batch that the same request made before. Raises ApiError: same key, other request."""
        now = time.time()
        for record in self.shelf.all():
            if key is not None and record.key == key:
                if record.asked != asked.digest:
                    message = "this Idempotency-Key was used for another request"
                    raise ApiError(409, message, code="idempotency_conflict")
                return record
            if (
                key is None
                and record.key is None
                and record.asked == asked.digest
                and now - record.created_at < SAME_S
                and record.status not in ("cancelling", "cancelled", "failed")
            ):
                return record
        return None

    def create(
        self, asked: Asked, key: str | None, model: str | None, ref: ModelRef
    ) -> BatchRecord:
        """A new batch, on disk."""
        now = int(time.time())
        return self.shelf.save(
            BatchRecord(
                id=f"batch_{base64.b32encode(uuid.uuid4().bytes).decode().lower()[:26]}",
                endpoint=asked.endpoint,
                model=model,
                ref=ref,
                input_file_id=asked.input_file_id,
                completion_window=asked.completion_window,
                created_at=now,
                expires_at=now + asked.seconds,
                metadata=asked.metadata,
                priority=asked.priority,
                key=key,
                asked=asked.digest,
            )
        )

    def cancel(self, batch_id: str) -> BatchRecord:
        """Note that a batch is to be cancelled; one that is over, or noted, is left as it is."""
        with self.shelf.lock:
            record = self.shelf.get(batch_id)
            assert record is not None
            if record.is_over or record.cancelling_at is not None:
                return record
            return self.shelf.change(batch_id, status="cancelling", cancelling_at=int(time.time()))


def window_s(text: str) -> int | None:
    """Seconds of a window like 24h; None when it is none."""
    found = _WINDOW.fullmatch(text)
    return int(found[1]) * _SECONDS[found[2]] if found else None
