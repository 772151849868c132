"""The queue as producers and workers call it, on a real server and on a fake."""

from __future__ import annotations

import pytest
import redis
from queue_tools import MODEL, all_results, assert_settled, done, row, submit

from dflash_batch.worker.contract import (
    Batch,
    BatchState,
    Key,
    Lease,
    ModelRef,
    RowStatus,
    Shard,
    WorkerInfo,
)
from dflash_batch.worker.holdings import Care
from dflash_batch.worker.queue import Queue, QueueRefused, QueueUnreachable, connect

TTL = 60_000


@pytest.fixture
def queue(queue_on_either: Queue) -> Queue:
    return queue_on_either


def finish(queue: Queue, lease: Lease) -> None:
    queue.commit(lease, [done(index) for index in lease.pending])


def expire(queue: Queue, lease: Lease) -> None:
    """Let the lease run out, as if its time had passed."""
    queue.client.zadd(Key.LEASES, {lease.shard.id: 1})


def lease_one(queue: Queue, worker: str = "w") -> Lease:
    (lease,) = queue.lease(worker, MODEL.key, TTL, 1)
    return lease


def test_rows_come_back_in_their_order_and_settle(queue: Queue) -> None:
    rows = [row(i) for i in range(10)]
    submit(queue, rows)
    leases = queue.lease("w", MODEL.key, TTL, 5)
    assert [lease.shard.id for lease in leases] == ["batch_a-0", "batch_a-1", "batch_a-2"]
    assert [spec for lease in leases for spec in lease.shard.rows] == rows
    assert [lease.pending for lease in leases] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    outcomes = [queue.commit(lease, [done(index) for index in lease.pending]) for lease in leases]
    assert [outcome.shard_done for outcome in outcomes] == [True, True, True]
    assert [outcome.batch_done for outcome in outcomes] == [False, False, True]
    assert [result.index for result in all_results(queue)] == list(range(10))
    assert_settled(queue)


def test_an_upload_is_not_leased_before_it_is_sealed_and_may_be_repeated(queue: Queue) -> None:
    batch = Batch(id="batch_a", model=MODEL)
    shard = Shard(id="batch_a-0", batch_id="batch_a", rows=[row(0)])
    assert queue.create(batch)
    assert not queue.create(batch)
    queue.add([shard])
    queue.add([shard])
    assert queue.lease("w", MODEL.key, TTL, 1) == []
    with pytest.raises(QueueRefused, match="not all of its 2 rows"):
        queue.seal("batch_a", 2)
    queue.seal("batch_a", 1)
    queue.seal("batch_a", 1)
    assert queue.mirror is not None
    assert queue.mirror.queue.job_ids == ["batch_a-0"]
    assert len(queue.lease("w", MODEL.key, TTL, 5)) == 1
    queue.add([shard])
    assert queue.lease("w", MODEL.key, TTL, 5) == []


def test_what_is_unknown_or_sealed_takes_no_rows(queue: Queue) -> None:
    shard = Shard(id="batch_a-9", batch_id="batch_a", rows=[row(9)])
    with pytest.raises(QueueRefused):
        queue.add([shard])
    with pytest.raises(QueueRefused):
        queue.seal("batch_a", 0)
    submit(queue, [row(0)])
    with pytest.raises(QueueRefused):
        queue.add([shard])
    assert queue.status("batch_b") is None


def test_an_empty_batch_is_done_when_it_is_sealed(queue: Queue) -> None:
    submit(queue, [])
    assert_settled(queue)


def test_the_first_record_of_a_row_stays(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(4)])
    lease = lease_one(queue)
    assert queue.commit(lease, [done(0, "first")])[:2] == (1, 0)
    assert queue.commit(lease, [done(0, "second"), done(1)])[:2] == (1, 1)
    queue.commit(lease, [done(2), done(3)])
    again = queue.commit(lease, [done(2), done(3)])  # the answer to the last commit was lost
    assert again == (0, 2, True, True, False, False)
    (first, *_) = all_results(queue)
    assert first.response is not None
    assert first.response["body"]["text"] == "first"
    assert_settled(queue)


def test_a_lease_that_ran_out_goes_to_another_and_only_what_is_missing_runs(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(4)])
    old = lease_one(queue, "old")
    queue.commit(old, [done(2)])
    expire(queue, old)
    new = lease_one(queue, "new")
    assert new.epoch == 2
    assert new.pending == [0, 1, 3]
    assert queue.commit(old, [done(0, "late")]).fenced
    assert queue.beat("old", TTL, [old]) == {old.shard.id: "lost"}
    assert queue.beat("new", TTL, [new]) == {new.shard.id: "ok"}
    assert not queue.release(old)
    finish(queue, new)
    assert_settled(queue)


def test_an_epoch_alone_is_no_fence(queue: Queue) -> None:
    submit(queue, [row(0)])
    lease = lease_one(queue)
    stranger = lease.model_copy(update={"owner": "stranger"})
    assert queue.commit(stranger, [done(0)]).fenced
    assert not queue.release(stranger)
    finish(queue, lease)
    assert_settled(queue)


def test_a_sleeper_whose_shard_nobody_took_gets_it_back_without_blame(queue: Queue) -> None:
    submit(queue, [row(0), row(1)])
    lease = lease_one(queue)
    expire(queue, lease)
    assert queue.reap() == 1
    assert queue.commit(lease, [done(0)]).fenced
    assert queue.beat("w", TTL, [lease]) == {lease.shard.id: "ok"}
    assert queue.commit(lease, [done(0)]).accepted == 1
    queue.release(lease)
    assert Care.of(lease_one(queue)) is Care.TOGETHER


def test_a_sleeper_whose_shard_was_taken_clears_it_of_suspicion(queue: Queue) -> None:
    submit(queue, [row(0), row(1)])
    old = lease_one(queue, "old")
    expire(queue, old)
    new = lease_one(queue, "new")
    assert Care.of(new) is Care.ALONE
    assert queue.beat("old", TTL, [old]) == {old.shard.id: "lost"}
    assert queue.beat("old", TTL, [old]) == {old.shard.id: "lost"}  # cleared once only
    queue.release(new)
    assert Care.of(lease_one(queue)) is Care.TOGETHER


def test_released_shards_come_first_and_unblamed(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(12)])
    first, second = queue.lease("w", MODEL.key, TTL, 2)
    assert queue.release(second)
    assert queue.release(first)
    assert not queue.release(first)
    assert [lease.shard.id for lease in queue.lease("w", MODEL.key, TTL, 3)] == [
        "batch_a-0",
        "batch_a-1",
        "batch_a-2",
    ]


def test_a_suspect_is_leased_alone_and_to_empty_hands(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(12)])
    suspect = lease_one(queue)
    queue.release(suspect, crashed=True)
    (other,) = queue.lease("busy", MODEL.key, TTL, 1)
    assert other.shard.id == "batch_a-0", "empty hands get the suspect"
    queue.release(other)
    (only,) = queue.lease("w", MODEL.key, TTL, 3)
    assert only.shard.id == "batch_a-0"
    assert Care.of(only) is Care.ROW_BY_ROW
    (beside,) = queue.lease("w2", MODEL.key, TTL, 1)
    queue.release(only)
    assert beside.shard.id == "batch_a-1"
    (next_one,) = queue.lease("w2", MODEL.key, TTL, 2)
    assert next_one.shard.id == "batch_a-2", "busy hands get past the suspect"


def test_suspicion_grows_with_deaths_and_ends_with_a_condemned_row(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(4)])
    cares = []
    for _ in range(3):
        lease = lease_one(queue)
        cares.append(Care.of(lease))
        queue.release(lease, crashed=True)
    lease = lease_one(queue)
    assert [*cares, Care.of(lease)] == [
        Care.TOGETHER,
        Care.ROW_BY_ROW,
        Care.ROW_BY_ROW,
        Care.CONDEMNED,
    ]
    queue.commit(lease, [done(0)])
    queue.release(lease)
    assert Care.of(lease_one(queue)) is Care.ROW_BY_ROW, "the rest goes on with care"


def test_a_row_recorded_takes_suspicion_away(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(4)])
    lease = lease_one(queue)
    queue.release(lease, crashed=True)
    lease = lease_one(queue)
    queue.commit(lease, [done(0)])
    queue.release(lease)
    assert Care.of(lease_one(queue)) is Care.TOGETHER


def test_shards_of_a_lease_whose_answer_was_lost_are_put_back_at_the_beat(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(8)])
    known, _lost_answer = queue.lease("w", MODEL.key, TTL, 2)
    assert queue.beat("w", TTL, [known]) == {known.shard.id: "ok"}
    again = lease_one(queue, "other")
    assert again.shard.id == "batch_a-1"
    assert Care.of(again) is Care.TOGETHER


def test_batches_share_and_a_late_one_starts_level(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(40)], batch_id="batch_a")
    for _ in range(4):
        queue.lease("w", MODEL.key, TTL, 1)
    submit(queue, [row(i) for i in range(40)], batch_id="batch_b")
    served = [queue.lease("w", MODEL.key, TTL, 1)[0].shard.batch_id for _ in range(12)]
    assert served.count("batch_b") == 6


def test_workers_see_shards_of_their_model_only(queue: Queue) -> None:
    other = ModelRef(target="other")
    submit(queue, [row(0)])
    submit(queue, [row(0)], batch_id="batch_b", model=other)
    assert queue.wanted() == [MODEL, other]
    (lease,) = queue.lease("w", other.key, TTL, 5)
    assert lease.shard.batch_id == "batch_b"
    assert queue.wanted() == [MODEL]


def test_a_private_worker_leases_its_own_batch_only(queue: Queue) -> None:
    submit(queue, [row(0)], batch_id="batch_a")
    submit(queue, [row(0)], batch_id="batch_b")
    (lease,) = queue.lease("w", MODEL.key, TTL, 5, batch_id="batch_b")
    assert lease.shard.batch_id == "batch_b"
    assert queue.lease("w", MODEL.key, TTL, 5, batch_id="batch_b") == []


def test_results_are_tailed_and_forgotten_once_acknowledged(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(6)])
    assert queue.results("batch_a", "0-0", block_ms=0) == []
    for lease in queue.lease("w", MODEL.key, TTL, 2):
        finish(queue, lease)
    head = queue.results("batch_a", "0-0", count=4)
    tail = queue.results("batch_a", head[-1][0])
    assert [result.index for _, result in head + tail] == list(range(6))
    queue.acknowledge("batch_a", head[-1][0])
    assert [result.index for result in all_results(queue)] == [4, 5]
    status = queue.status("batch_a")
    assert status is not None
    assert status.exported == head[-1][0]


def test_cancel_ends_every_row_and_fences_the_holder(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(8)])
    lease = lease_one(queue)
    queue.commit(lease, [done(0)])
    assert queue.cancel("batch_a")
    assert not queue.cancel("batch_a")
    assert queue.beat("w", TTL, [lease]) == {lease.shard.id: "cancelled"}
    assert queue.commit(lease, [done(1)]).fenced
    status = queue.status("batch_a")
    assert status is not None
    assert (status.state, status.ok, status.failed) == (BatchState.CANCELLED, 1, 7)
    assert {result.status for result in all_results(queue)} == {RowStatus.OK, RowStatus.CANCELLED}
    assert queue.lease("w", MODEL.key, TTL, 5) == []
    assert_settled(queue)


def test_cancel_of_an_upload_ends_the_rows_it_has(queue: Queue) -> None:
    queue.create(Batch(id="batch_a", model=MODEL))
    queue.add([Shard(id="batch_a-0", batch_id="batch_a", rows=[row(0), row(1)])])
    assert queue.cancel("batch_a")
    assert_settled(queue)


def test_a_cancel_that_was_cut_short_is_finished_by_the_next(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(8)])
    lease = lease_one(queue)
    queue._run("cancel", "batch_a")
    queue._run("seize", "batch_a", "cancel-killed", 60_000, 0, "batch_a-1")
    expire(queue, lease)
    assert queue.lease("w", MODEL.key, TTL, 5) == []
    assert queue.cancel("batch_a")
    assert_settled(queue)


def test_forget_leaves_nothing(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(8)])
    lease = lease_one(queue)
    queue.commit(lease, [done(0)])
    submit(queue, [row(0)], batch_id="batch_b")
    queue.forget("batch_a")
    queue.forget("batch_b")
    queue.acknowledge("batch_a", "1-1")
    assert queue.batches() == []
    assert queue.commit(lease, [done(1)]).fenced
    assert queue.beat("w", TTL, [lease]) == {lease.shard.id: "lost"}
    left = {key.decode() for key in queue.client.scan_iter("*")}
    assert left <= {Key.META, Key.MODELS, f"{Key.RQ_PREFIX}:queues"}


def test_workers_are_listed_while_they_announce_themselves(queue: Queue) -> None:
    info = WorkerInfo(name="host-1", host="host", pid=7, model=MODEL)
    queue.announce(info, 60)
    queue.announce(info.model_copy(update={"name": "host-2"}), 60)
    assert queue.workers() == [info, info.model_copy(update={"name": "host-2"})]
    queue.retire("host-1")
    queue.client.delete(Key.worker("host-2"))  # its time has passed
    assert queue.workers() == []
    assert queue.sweep() == []
    assert queue.client.scard(Key.WORKERS) == 0


def test_batches_are_listed_newest_first(queue: Queue) -> None:
    for number, name in enumerate(["batch_a", "batch_b"]):
        queue.create(Batch(id=name, model=MODEL, created=1000.0 + number))
    assert [status.batch.id for status in queue.batches()] == ["batch_b", "batch_a"]
    assert [status.state for status in queue.batches()] == [BatchState.UPLOADING] * 2


def test_without_the_view_nothing_of_rq_is_written(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client, mirror=False)
    submit(queue, [row(i) for i in range(8)])
    for lease in queue.lease("w", MODEL.key, TTL, 5):
        finish(queue, lease)
    assert_settled(queue)
    assert not list(redis_client.scan_iter(f"{Key.RQ_PREFIX}:*"))


def test_scripts_come_back_after_they_were_flushed(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client)
    submit(queue, [row(0)])
    redis_client.script_flush()
    finish(queue, lease_one(queue))
    assert_settled(queue)


def test_every_key_is_in_one_slot(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client)
    submit(queue, [row(i) for i in range(8)])
    queue.announce(WorkerInfo(name="w", host="h", pid=1), 60)
    finish(queue, lease_one(queue))
    assert all(key.startswith(Key.TAG.encode()) for key in redis_client.scan_iter("*"))


def test_an_address_where_nobody_answers_is_named_without_its_password() -> None:
    with pytest.raises(QueueUnreachable) as caught:
        connect("redis://user:secret@localhost:1/0", retries=0)
    assert "localhost:1" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.code == "queue_unreachable"
    with pytest.raises(QueueUnreachable):
        connect("nonsense://x")
