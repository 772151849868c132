"""What Prometheus scrapes. Names end in their unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from dflash_batch.worker.contract import WorkerInfo
from dflash_batch.worker.gateway.batches import BatchRecord

_PREFIX = "dflash_batch"


def exposition(
    workers: Sequence[WorkerInfo], batches: Sequence[BatchRecord], waiting: int
) -> tuple[bytes, str]:
    """The text, and its content type. All are gauges: batches may be counted anew at any time."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", text, labels, registry=registry)

    by_state = gauge("workers", "Workers seen lately.", ["state"])
    for state, count in Counter(worker.state for worker in workers).items():
        by_state.labels(state).set(count)
    speed = gauge("worker_tokens_per_second", "Tokens a worker makes.", ["worker"])
    active = gauge("worker_active_rows", "Rows in a worker's decoder.", ["worker"])
    for worker in workers:
        speed.labels(worker.name).set(worker.tokens_per_s)
        active.labels(worker.name).set(worker.active)
    by_status = gauge("batches", "Batches of this server.", ["status"])
    for status, count in Counter(record.status for record in batches).items():
        by_status.labels(status).set(count)
    rows = gauge("rows", "Rows of batches that are over.", ["outcome"])
    rows.labels("ok").set(sum(record.completed for record in batches))
    rows.labels("failed").set(sum(record.failed for record in batches))
    tokens = gauge("tokens", "Tokens of batches that are over.", ["kind"])
    tokens.labels("input").set(sum(record.input_tokens for record in batches))
    tokens.labels("cached").set(sum(record.cached_tokens for record in batches))
    tokens.labels("output").set(sum(record.output_tokens for record in batches))
    gauge("live_requests_waiting", "Live requests that wait for their answer.").set(waiting)
    return generate_latest(registry), CONTENT_TYPE_LATEST
