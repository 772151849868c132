"""What a worker is told when it starts."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any

from dflash_batch.worker.contract import ModelRef, Spec

ENGINE_COMMAND = (sys.executable, "-m", "dflash_batch.worker.engine")


@dataclass(frozen=True)
class WorkerSettings:
    """Plain values; `to_json` and `from_json` carry them to a process of its own."""

    redis_url: str
    model: ModelRef | None = None  # None: whatever the queue has work for
    max_batch: int = 16  # rows decoded together
    lease_ttl_s: float = 45.0
    max_context: int | None = None
    spec: Spec = "on"  # draft where it pays (auto), always, or never; no token depends on it
    cost_dir: str | None = None  # where measured cycle costs are kept
    only_when: str = ""  # conditions under which rows may run, see conditions.py
    pending_dir: str | None = None  # where records wait while the queue is away; None: in memory
    cache_dir: str | None = None  # where prefixes are kept on SSD; None: in memory only
    cache_bytes: int | None = None  # most bytes in it; None: the store's default
    memory: int | None = None  # bytes an engine may use on its device; None: most of what it has
    diagnostics: str | None = None  # folder in which engines note what cycles and rows took
    burst: bool = False  # exit when nothing is left to do
    batch_id: str | None = None  # private worker: only this batch, exit when it is over
    engine_command: tuple[str, ...] = ENGINE_COMMAND
    name: str | None = None  # "<host>-<uuid>" by default
    grace_s: float = 60.0  # after a signal, rows in hand have this long to finish
    memory_limit: int | None = None  # bytes an engine may take; None: nine tenths of the machine's
    stall_timeout_s: float = 180.0  # an engine that makes no step for this long is replaced
    log_level: str = "INFO"
    parent_pid: int | None = None  # release all and exit when this process is gone
    notices: str | None = None  # file to append JSON lines to: loading, ready, failed, …

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.lease_ttl_s <= 0 or self.stall_timeout_s <= 0:
            raise ValueError("max_batch, lease_ttl_s and stall_timeout_s must be positive")

    @property
    def lease_ttl_ms(self) -> int:
        return int(self.lease_ttl_s * 1000)

    @property
    def call_timeout_s(self) -> float:
        """How long a call to the queue may take: a lost one must not cost the lease."""
        return min(5.0, self.lease_ttl_s / 4)

    @property
    def leaves_when_done(self) -> bool:
        return self.burst or self.batch_id is not None

    def to_json(self, *, with_url: bool = True) -> str:
        """As JSON. Without the URL for a command line that others can read."""
        values = dataclasses.asdict(self)
        values["model"] = self.model.model_dump() if self.model else None
        if not with_url:
            values["redis_url"] = ""
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str, *, redis_url: str | None = None) -> WorkerSettings:
        """Inverse of `to_json`; `redis_url` replaces what the text says. Raises ValueError."""
        values: dict[str, Any] = json.loads(text)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"unknown worker settings: {', '.join(unknown)}")
        if redis_url:
            values["redis_url"] = redis_url
        if not values.get("redis_url"):
            raise ValueError("redis_url is missing")
        if values.get("model") is not None:
            values["model"] = ModelRef.model_validate(values["model"])
        if "engine_command" in values:
            values["engine_command"] = tuple(values["engine_command"])
        return cls(**values)
