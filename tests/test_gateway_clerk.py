"""What becomes of batches that come too late, and of rows that the queue loses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from queue_tools import MODEL, WorkerProcess, until

from dflash_batch.worker.contract import CHAT
from dflash_batch.worker.gateway.batches import Asked, Batches, BatchRecord
from dflash_batch.worker.gateway.clerk import Clerk
from dflash_batch.worker.gateway.files import Files
from dflash_batch.worker.queue import Queue


@contextmanager
def clerk(folder: Path, url: str) -> Iterator[tuple[Clerk, Batches, Files]]:
    files, batches = Files(folder / "files"), Batches(folder / "batches")
    found = Clerk(batches, files, url)
    found.start()
    yield found, batches, files
    found.stop()


def start(batches: Batches, files: Files, count: int, seconds: int) -> BatchRecord:
    lines = [
        {"custom_id": f"q-{n}", "url": CHAT, "method": "POST", "body": {"messages": [message(n)]}}
        for n in range(count)
    ]
    part = files.part()
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = files.adopt(part, "in.jsonl")
    return batches.create(Asked(file.id, CHAT, "1m", seconds, None), None, None, MODEL)


def message(n: int) -> dict[str, str]:
    return {"role": "user", "content": f"question {n}"}


def over(batches: Batches, record: BatchRecord) -> BatchRecord:
    def is_over() -> bool:
        return now().is_over

    def now() -> BatchRecord:
        found = batches.shelf.get(record.id)
        assert found is not None
        return found

    until(is_over, "the batch is over")
    return now()


def records(files: Files, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in files.path(file_id).read_text().splitlines()]


def test_rows_that_are_too_late_expire(tmp_path: Path, valkey_url: str, queue: Queue) -> None:
    with clerk(tmp_path, valkey_url) as (_, batches, files):
        record = over(batches, start(batches, files, 40, -1))
        assert record.status == "expired"
        assert record.expired_at is not None
        assert record.expired_at <= time.time()
        found = records(files, record.error_file_id)
        assert {r["error"]["code"] for r in found} == {"batch_expired"}
        assert len({r["custom_id"] for r in found}) == 40
    assert queue.batches() == []


def test_rows_that_the_queue_lost_are_queued_again(
    tmp_path: Path, valkey_url: str, queue: Queue, redis_client: redis.Redis
) -> None:
    with clerk(tmp_path, valkey_url) as (_, batches, files):
        record = start(batches, files, 40, 3600)
        until(lambda: bool(queue.unfinished()), "the batch is queued")
        redis_client.flushall()
        until(lambda: bool(queue.unfinished()), "the batch is queued again")
        worker = WorkerProcess(valkey_url, log=tmp_path / "log")
        record = over(batches, record)
        worker.kill()
        assert record.status == "completed"
        ids = {r["custom_id"] for r in records(files, record.output_file_id)}
        assert ids == {f"q-{n}" for n in range(40)}


def test_records_survive_a_restart(tmp_path: Path, valkey_url: str, queue: Queue) -> None:
    with clerk(tmp_path, valkey_url) as (_, batches, files):
        record = over(batches, start(batches, files, 2, -1))
    again = Batches(tmp_path / "batches")
    assert again.shelf.get(record.id) == record
    names = {f.id for f in Files(tmp_path / "files").shelf.all()}
    assert names == {record.input_file_id, record.error_file_id}
