"""Whose turn it is: class, share, age; and which prefix goes to which worker."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from queue_tools import MODEL, assert_settled, done, row, submit

from dflash_batch.worker.contract import Batch, BatchState, Key, Lease, Shard, WorkerInfo
from dflash_batch.worker.holdings import Care
from dflash_batch.worker.queue import Queue

TTL = 60_000


@pytest.fixture
def queue(queue_on_either: Queue) -> Queue:
    return queue_on_either


def upload(queue: Queue, batch_id: str, groups: str, **facts: float) -> None:
    """A batch of shards of one row; each letter is the group of one, "." none."""
    queue.create(Batch(id=batch_id, model=MODEL, **facts))
    queue.add(
        [
            Shard(
                id=f"{batch_id}-{n}",
                batch_id=batch_id,
                group="" if letter == "." else letter,
                rows=[row(n)],
            )
            for n, letter in enumerate(groups)
        ]
    )
    queue.seal(batch_id, len(groups))


def take(queue: Queue, worker: str, count: int = 1, hot: str = "") -> list[Lease]:
    return queue.lease(worker, MODEL.key, TTL, count, hot=list(hot))


def groups_of(leases: list[Lease]) -> str:
    return "".join(lease.shard.group or "." for lease in leases)


def served(queue: Queue, count: int) -> Counter[str]:
    """Batches of the next leases, each shard given to a worker of its own."""
    leases = [lease for n in range(count) for lease in take(queue, f"served-{n}")]
    return Counter(lease.shard.batch_id for lease in leases)


def finish(queue: Queue, *batches: str) -> None:
    """Do what is left, and see that nothing is left behind."""
    for key in queue.client.scan_iter(Key.worker_leases("*")):
        queue.beat(key.decode().rpartition(":")[2], TTL, [])  # they have forgotten what they held
    while leases := take(queue, "last", 50):
        for lease in leases:
            queue.commit(lease, [done(index) for index in lease.pending])
    for batch_id in batches:
        assert_settled(queue, batch_id)


def test_a_higher_class_goes_first_and_a_change_of_class_counts_at_once(queue: Queue) -> None:
    upload(queue, "batch_a", "......")
    upload(queue, "batch_b", "......", priority=5)
    assert served(queue, 2) == {"batch_b": 2}
    assert queue.set_priority("batch_a", 6)
    assert served(queue, 2) == {"batch_a": 2}
    assert queue.set_priority("batch_a", -10)
    assert served(queue, 4) == {"batch_b": 4}
    assert served(queue, 3) == {"batch_a": 3}
    status = queue.status("batch_a")
    assert status is not None
    assert (status.priority, status.batch.priority) == (-10, 0)
    finish(queue, "batch_a", "batch_b")
    assert not queue.set_priority("batch_a", 1)
    assert not queue.set_priority("batch_x", 1)


def test_within_a_class_rows_go_by_weight(queue: Queue) -> None:
    upload(queue, "batch_a", "." * 40, weight=3.0)
    upload(queue, "batch_b", "." * 40, weight=1.0)
    assert served(queue, 20) == {"batch_a": 15, "batch_b": 5}
    assert queue.set_priority("batch_b", 0, 3.0)
    assert served(queue, 20) == {"batch_a": 10, "batch_b": 10}
    finish(queue, "batch_a", "batch_b")


def test_who_gets_nothing_for_long_rises_and_falls_back_when_served(queue: Queue) -> None:
    upload(queue, "batch_a", "......")
    upload(queue, "batch_b", "." * 20, priority=3)
    for first in ("batch_b", "batch_b", "batch_a"):
        queue.client.zadd(Key.AGING, {"batch_a": 1})  # half an hour has passed
        assert served(queue, 1) == {first: 1}
    assert served(queue, 3) == {"batch_b": 3}
    finish(queue, "batch_a", "batch_b")


def test_a_paused_batch_or_queue_gives_nothing_and_takes_records(queue: Queue) -> None:
    upload(queue, "batch_a", "...")
    (lease,) = take(queue, "w")
    assert queue.pause("batch_a")
    assert not queue.pause("batch_a")
    assert take(queue, "w") == []
    assert queue.commit(lease, [done(0)]).accepted == 1
    status = queue.status("batch_a")
    assert status is not None
    assert (status.state, status.left) == (BatchState.PAUSED, 2)
    assert queue.resume("batch_a")
    assert not queue.resume("batch_a")
    queue.pause_all()
    assert queue.paused
    assert take(queue, "w") == []
    assert queue.resume_all()
    assert not queue.resume_all()
    (lease,) = take(queue, "w")
    queue.pause("batch_a")
    queue.release(lease)
    assert take(queue, "w") == [], "what comes back to a paused batch stays there"
    queue.resume("batch_a")
    finish(queue, "batch_a")


def test_the_last_rows_of_a_paused_batch_end_it(queue: Queue) -> None:
    upload(queue, "batch_a", ".")
    (lease,) = take(queue, "w")
    queue.pause("batch_a")
    assert queue.commit(lease, [done(0)]).batch_done
    assert_settled(queue)


def test_an_upload_is_neither_paused_nor_resumed_into_running(queue: Queue) -> None:
    queue.create(Batch(id="batch_a", model=MODEL))
    assert not queue.pause("batch_a")
    assert not queue.resume("batch_a")
    assert not queue.resume("batch_x")


def test_a_worker_stays_with_its_prefix_and_another_gets_a_free_one(queue: Queue) -> None:
    upload(queue, "batch_a", "aaaabbbbcc")
    assert groups_of(take(queue, "ann", 2)) == "aa"
    assert groups_of(take(queue, "bob", 2)) == "bb"
    assert groups_of(take(queue, "ann", 1, hot="a")) == "a"
    assert groups_of(take(queue, "bob", 3, hot="b")) == "bbc"
    finish(queue, "batch_a")


def test_a_worker_steals_only_when_no_prefix_is_free(queue: Queue) -> None:
    upload(queue, "batch_a", "aaaaaabbb")
    take(queue, "ann")
    take(queue, "bob")
    assert groups_of(take(queue, "eve", 2)) == "aa", "where most is left for each"
    assert groups_of(take(queue, "eve", 3, hot="a")) == "aaa"
    assert groups_of(take(queue, "eve", 3, hot="a")) == "bb", "rather than be idle"
    finish(queue, "batch_a")


def test_a_prefix_hot_at_a_living_worker_is_left_to_it_while_there_is_another(
    queue: Queue,
) -> None:
    upload(queue, "batch_a", "a")
    (lease,) = take(queue, "ann")
    queue.commit(lease, [done(0)])
    upload(queue, "batch_b", "aabb")
    assert groups_of(take(queue, "bob")) == "a", "nobody of that name lives"
    queue.announce(WorkerInfo(name="bob", host="h", pid=1), 60)
    queue.beat("bob", TTL, [])
    assert groups_of(take(queue, "eve", 4)) == "bbaa"
    finish(queue, "batch_a", "batch_b")


def test_shards_without_a_prefix_go_in_their_order_to_anybody(queue: Queue) -> None:
    upload(queue, "batch_a", "........")
    numbers = [
        int(lease.shard.id.rpartition("-")[2])
        for worker in ("ann", "bob", "ann", "bob")
        for lease in take(queue, worker, 2)
    ]
    assert all(first < second for first, second in pairwise(numbers))
    finish(queue, "batch_a")


def test_a_batch_of_another_schema_is_passed_over(queue: Queue) -> None:
    upload(queue, "batch_a", "..")
    upload(queue, "batch_b", "..")
    queue.client.hset(Key.batch("batch_a"), "schema", 99)
    assert {lease.shard.batch_id for lease in take(queue, "w", 5)} == {"batch_b"}
    (lease,) = queue.lease("new", MODEL.key, TTL, 1, schemas=(1, 99))
    assert lease.shard.batch_id == "batch_a"


def test_a_worker_that_is_to_drain_gets_nothing_more(queue: Queue) -> None:
    upload(queue, "batch_a", "...")
    info = WorkerInfo(name="w", host="h", pid=1, model_key=MODEL.key)
    (lease,) = take(queue, "w")
    assert queue.announce(info, 60) == (None, False)
    queue.drain("w", 30.0)
    assert queue.announce(info, 60).drain_s == 30.0
    assert take(queue, "w") == []
    queue.commit(lease, [done(0)])
    queue.retire("w")
    assert len(take(queue, "w", 5)) == 2, "the next of this name is another"


def test_an_idle_worker_is_known_until_rows_are_given_back(queue: Queue) -> None:
    queue.create(Batch(id="batch_a", model=MODEL))
    shard = Shard(id="batch_a-0", batch_id="batch_a", group="g", rows=[row(i) for i in range(6)])
    queue.add([shard])
    queue.seal("batch_a", 6)
    (lease,) = take(queue, "ann")
    assert not queue.commit(lease, [done(0)]).hungry
    assert take(queue, "bob") == []
    assert queue.commit(lease, [done(1)]).hungry
    rows = lease.shard.rows[4:]
    parted = queue.give_back(lease, rows)
    assert parted is not None
    again = queue.give_back(lease, rows)
    assert again == parted, "the answer was lost: nothing happens twice"
    assert (parted.shard_done, [spec.index for spec in parted.lease.shard.rows]) == (
        False,
        [0, 1, 2, 3],
    )
    assert not queue.commit(parted.lease, [done(2)]).hungry
    (given,) = take(queue, "bob")
    assert (given.shard.group, given.pending, given.epoch) == ("g", [4, 5], 1)
    queue.release(parted.lease)
    (rest,) = take(queue, "ann")
    assert rest.pending == [3], "what was given back is not in the shard any more"
    assert queue.give_back(lease, lease.shard.rows[:1]) is None, "an old lease gives nothing"
    queue.commit(rest, [done(3)])
    queue.commit(given, [done(4), done(5)])
    assert_settled(queue)


def test_rows_with_a_record_are_not_given_back(queue: Queue) -> None:
    submit(queue, [row(0), row(1)])
    (lease,) = take(queue, "w")
    queue.commit(lease, [done(0)])
    with pytest.raises(ValueError, match="have a record"):
        queue.give_back(lease, [row(0)])
    parted = queue.give_back(lease, [row(1)])
    assert parted is not None
    assert parted.shard_done, "all that stays has a record"
    finish(queue, "batch_a")


def test_a_row_is_tried_again_after_growing_pauses_as_often_as_allowed(queue: Queue) -> None:
    submit(queue, [row(0), row(1)])
    (lease,) = take(queue, "w")
    pauses: list[float] = []
    for attempt in (1, 2):
        parted = queue.retry_row(lease, row(1))
        assert parted is not None
        assert parted.gone
        pauses.append(parted.pause_s)
        assert queue.retry_row(lease, row(1)) is not None, "a lost answer counts no attempt"
        if attempt == 1:
            assert queue.commit(parted.lease, [done(0)]).shard_done
        assert take(queue, "w") == [], "it waits"
        (waiting,) = queue.client.zrange(Key.LATER, 0, -1)
        queue.client.zadd(Key.LATER, {waiting: 1})
        (lease,) = take(queue, "w")
        assert (lease.pending, lease.tried, Care.of(lease)) == ([1], {1: attempt}, Care.TOGETHER)
    assert 7.5 <= pauses[0] <= 12.5
    assert 15 <= pauses[1] <= 25
    last = queue.retry_row(lease, row(1))
    assert last == (lease, False, False, 0.0)
    queue.commit(lease, [done(1)])
    assert_settled(queue)


def test_rows_of_a_cancelled_batch_do_not_move(queue: Queue) -> None:
    submit(queue, [row(i) for i in range(4)])
    (lease,) = take(queue, "w")
    parted = queue.retry_row(lease, row(3))
    assert parted is not None
    queue._run("cancel", "batch_a")
    assert queue.give_back(parted.lease, [row(0)]) is None
    assert queue.retry_row(parted.lease, row(0)) is None
    assert queue.cancel("batch_a"), "what was begun is ended"
    assert_settled(queue)


def test_what_nobody_needs_is_swept_away(queue: Queue) -> None:
    upload(queue, "batch_a", ".")
    queue.create(Batch(id="batch_b", model=MODEL))
    queue.add([Shard(id="batch_b-0", batch_id="batch_b", rows=[row(0)])])
    assert queue.sweep() == []
    queue.client.hset(Key.batch("batch_b"), "touched", 1)
    assert queue.sweep() == ["batch_b"]
    queue.forget("batch_b")
    queue.client.delete(Key.batch("batch_a"))  # its time has passed
    assert queue.sweep() == []
    assert queue.client.hlen(Key.MODELS) == queue.client.zcard(Key.BATCHES) == 0


def test_looking_changes_nothing(queue: Queue) -> None:
    upload(queue, "batch_a", "..")
    (lease,) = take(queue, "w")
    queue.announce(WorkerInfo(name="gone", host="h", pid=1), 60)
    queue.client.delete(Key.worker("gone"))
    queue.client.zadd(Key.LEASES, {lease.shard.id: 1})  # it has run out
    queue.client.zadd(Key.BATCHES, {"batch_expired": 1})

    def everything() -> dict[bytes, bytes]:
        return {key: queue.client.dump(key) for key in queue.client.scan_iter("*")}

    before = everything()
    queue.batches()
    queue.status("batch_a")
    queue.workers()
    queue.unfinished()
    list(queue.failures("batch_a"))
    assert queue.paused is False
    assert everything() == before
