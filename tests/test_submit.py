"""Submitting: the same call may be repeated after any interruption."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import invoke, line, write_lines
from queue_tools import MODEL, row

from dflash_batch.worker.contract import BatchState, JobSpec, ModelRef
from dflash_batch.worker.prefix import plan
from dflash_batch.worker.queue import Queue, QueueRefused
from dflash_batch.worker.submit import CHUNK, BatchLost, batch_id_for, submit

ROWS = [row(index) for index in range(200)]


def send(queue: Queue, rows: list[JobSpec] = ROWS, batch_id: str = "batch_a") -> BatchState:
    status = submit(queue, rows, MODEL, batch_id=batch_id, name="in.jsonl")
    return status.state


def leased_rows(queue: Queue) -> list[int]:
    leases = queue.lease("w", MODEL.key, 10_000, 1000)
    return sorted(row.index for lease in leases for row in lease.shard.rows)


def test_the_id_depends_on_input_model_and_salt_and_on_nothing_else() -> None:
    one = batch_id_for("digest", MODEL)
    assert one == batch_id_for("digest", ModelRef(**MODEL.model_dump()))
    assert len(one) == len("batch_") + 26
    others = {
        batch_id_for("other", MODEL),
        batch_id_for("digest", ModelRef(target="fake", draft="none", dtype="float32")),
        batch_id_for("digest", MODEL, "again"),
    }
    assert len(others | {one}) == 4


def test_all_rows_are_queued_once_and_told_of(queue: Queue) -> None:
    told: list[tuple[int, int]] = []
    status = submit(
        queue,
        ROWS,
        MODEL,
        batch_id="batch_a",
        name="in.jsonl",
        progress=lambda done, total: told.append((done, total)),
    )
    assert (status.state, status.total, status.left) == (BatchState.RUNNING, 200, 200)
    assert status.batch.name == "in.jsonl"
    assert told[-1] == (200, 200)
    assert leased_rows(queue) == list(range(200))


def test_rows_are_leased_in_the_order_of_their_prefixes(queue: Queue) -> None:
    send(queue)
    leases = queue.lease("w", MODEL.key, 10_000, 1000)
    cut = plan(ROWS)
    assert [lease.shard.rows for lease in leases] == [list(piece.rows) for piece in cut.pieces]
    assert [lease.shard.group for lease in leases] == [piece.group for piece in cut.pieces]


class Killed(BaseException):
    """Raised when a test ends an upload in its middle."""


@pytest.mark.parametrize("sent", range(1, 5))
def test_an_upload_that_was_killed_goes_on_and_is_not_leased_before_its_end(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    monkeypatch.setattr("dflash_batch.worker.submit.CHUNK", 2)
    calls = itertools.count(1)

    def stop(done: int, total: int) -> None:
        if next(calls) == sent:
            raise Killed

    with pytest.raises(Killed):
        submit(queue, ROWS, MODEL, batch_id="batch_a", name="in.jsonl", progress=stop)
    status = queue.status("batch_a")
    assert status is not None
    assert status.state is BatchState.UPLOADING
    assert leased_rows(queue) == []

    assert send(queue) is BatchState.RUNNING
    assert leased_rows(queue) == list(range(200))


def test_submitting_a_sealed_batch_again_changes_nothing(queue: Queue) -> None:
    send(queue)
    taken = leased_rows(queue)
    assert send(queue) is BatchState.RUNNING
    assert leased_rows(queue) == []
    status = queue.status("batch_a")
    assert status is not None
    assert (status.total, len(taken)) == (200, 200)


def test_other_rows_under_the_same_id_are_refused_while_uploading(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int) -> None:
        raise Killed

    monkeypatch.setattr("dflash_batch.worker.submit.CHUNK", 2)
    with pytest.raises(Killed):
        submit(queue, ROWS, MODEL, batch_id="batch_a", name="in.jsonl", progress=stop)
    with pytest.raises(QueueRefused):
        send(queue, ROWS[:7])


def test_an_empty_batch_is_done_at_once(queue: Queue) -> None:
    assert send(queue, []) is BatchState.DONE


def test_a_batch_that_vanishes_while_it_is_sent_is_an_error(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = queue.seal

    def flushed(batch_id: str, total: int) -> None:
        seal(batch_id, total)
        queue.client.flushall()

    monkeypatch.setattr(queue, "seal", flushed)
    with pytest.raises(BatchLost, match="Submit it again"):
        send(queue)


def test_a_queued_row_takes_little_memory(queue: Queue) -> None:
    words = [f"{number * 7919 % 100_003:05x}" for number in range(100_000)]
    rows = [row(at, " ".join(words[at * 90 % 99_000 :][:90])) for at in range(CHUNK * 32)]
    size = sum(len(str(spec.messages)) for spec in rows) / len(rows)
    before = queue.client.info("memory")["used_memory"]
    send(queue, rows)
    taken = (queue.client.info("memory")["used_memory"] - before) / len(rows)
    assert size > 500
    assert taken < 400


KILLED_IN_UPLOAD = """
import os, signal, sys
from dflash_batch.worker import submit
from dflash_batch.worker.queue import Queue

sent, upload = 0, Queue.upload

def dying(queue, shards):
    global sent
    upload(queue, shards)
    sent += 1
    if sent == 3:
        os.kill(os.getpid(), signal.SIGKILL)

submit.CHUNK, Queue.upload = 2, dying
from dflash_batch.cli.main import main
main(["submit", sys.argv[1], "-m", "demo", "-q"])
"""


def test_a_client_killed_in_the_upload_leaves_nothing_to_lease_and_goes_on(
    queue: Queue, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_BATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DFLASH_BATCH_REDIS", valkey_url)
    source = write_lines(tmp_path / "in.jsonl", [line(f"q-{n}", f"{n}?") for n in range(300)])
    command = [sys.executable, "-c", KILLED_IN_UPLOAD, str(source)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    (begun,) = queue.batches()
    assert begun.state is BatchState.UPLOADING
    assert begun.shards == 6
    model = begun.batch.model.key
    assert queue.lease("w", model, 10_000, 100) == []

    result = invoke("submit", source, "-m", "demo", "-q")
    assert result.stdout.strip() == begun.batch.id
    (sealed,) = queue.batches()
    assert (sealed.state, sealed.total, sealed.shards) == (BatchState.RUNNING, 300, 10)
    leases = queue.lease("w", model, 10_000, 100)
    assert sorted(row.index for lease in leases for row in lease.shard.rows) == list(range(300))
