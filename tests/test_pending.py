"""Records on this machine's disk while the queue is away: kept, delivered, dropped."""

from __future__ import annotations

import stat
from collections import deque
from pathlib import Path

import pytest
from queue_tools import MODEL, all_results, assert_settled, done, is_done, row, submit

from dflash_batch.worker.contract import Key, Lease
from dflash_batch.worker.holdings import Care, Held
from dflash_batch.worker.pending import deliver, open_pending
from dflash_batch.worker.queue import Queue

URL = "redis://:secret@queue:6379/0"
TTL = 60_000


def held(lease: Lease, *finished: int) -> Held:
    results = [done(index) for index in finished]
    return Held(lease, Care.TOGETHER, deque(), finished=results)


def keep(folder: Path, worker: str, *shards: Held) -> None:
    """As a worker that dies with the queue away."""
    with open_pending(folder, URL, worker) as pending:
        pending.follow(shards, away=True)


def left(folder: Path, worker: str = "new") -> list[tuple[str, list[int]]]:
    with open_pending(folder, URL, worker) as pending, pending.left_behind() as found:
        return [(one.lease.shard.id, [r.index for r in one.results]) for one in found]


def lease_two(queue: Queue, worker: str = "old") -> list[Lease]:
    submit(queue, [row(i) for i in range(8)])
    return queue.lease(worker, MODEL.key, TTL, 2)


def test_what_a_dead_worker_had_is_recorded_and_the_rest_put_back(
    queue: Queue, tmp_path: Path
) -> None:
    first, second = lease_two(queue)
    keep(tmp_path, "old", held(first, 0, 2), held(second, 4, 5, 6, 7))
    with open_pending(tmp_path, URL, "new") as pending:
        deliver(pending, queue, TTL)
    assert sorted(result.index for result in all_results(queue)) == [0, 2, 4, 5, 6, 7]
    (again,) = queue.lease("new", MODEL.key, TTL, 5)
    assert again.pending == [1, 3]
    assert again.deaths == 0, "nobody is blamed"
    queue.commit(again, [done(1), done(3)])
    assert_settled(queue)
    assert left(tmp_path) == []


def test_what_somebody_has_taken_over_is_dropped(queue: Queue, tmp_path: Path) -> None:
    first, second = lease_two(queue)
    keep(tmp_path, "old", held(first, 0), held(second, 4))
    queue.client.zadd(Key.LEASES, {first.shard.id: 1, second.shard.id: 1})  # ran out
    taken = queue.lease("other", MODEL.key, TTL, 1)
    with open_pending(tmp_path, URL, "new") as pending:
        deliver(pending, queue, TTL)
    recorded = {result.index for result in all_results(queue)}
    assert len(recorded) == 1, "the shard that nobody took came back to its owner"
    assert not recorded & set(taken[0].pending)
    for lease in [*taken, *queue.lease("third", MODEL.key, TTL, 5)]:
        queue.commit(lease, [done(index) for index in lease.pending])
    assert is_done(queue)
    assert_settled(queue)


def test_what_cannot_be_delivered_now_stays(queue: Queue, tmp_path: Path) -> None:
    first, _ = lease_two(queue)
    keep(tmp_path, "old", held(first, 0))
    with (
        pytest.raises(ConnectionError),
        open_pending(tmp_path, URL, "new") as pending,
        pending.left_behind(),
    ):
        raise ConnectionError
    assert left(tmp_path) == [("batch_a-0", [0])]


def test_a_living_workers_records_are_its_own(queue: Queue, tmp_path: Path) -> None:
    first, _ = lease_two(queue)
    with open_pending(tmp_path, URL, "old") as pending:
        pending.follow([held(first, 0)], away=True)
        assert left(tmp_path) == []
        pending.follow([held(first, 0, 1)], away=True)
        pending.follow([held(first, 0, 1)], away=False)  # kept until they are committed
        assert left(tmp_path) == []
    assert left(tmp_path, "third") == [("batch_a-0", [0, 1])]


def test_what_was_committed_or_lost_leaves_the_disk(queue: Queue, tmp_path: Path) -> None:
    first, second = lease_two(queue)
    with open_pending(tmp_path, URL, "old") as pending:
        pending.follow([held(first, 0), held(second, 4)], away=True)
        pending.follow([held(second, 4)], away=False)
        pending.follow([held(first, 1)], away=False)  # the queue answers: nothing is written
    assert left(tmp_path) == []


def test_each_queue_has_its_own_and_a_new_password_makes_no_new_queue(
    queue: Queue, tmp_path: Path
) -> None:
    first, _ = lease_two(queue)
    keep(tmp_path, "old", held(first, 0))
    with (
        open_pending(tmp_path, "redis://other:6379/0", "new") as other,
        other.left_behind() as found,
    ):
        assert found == []
    same = URL.replace("secret", "changed")
    with open_pending(tmp_path, same, "new") as pending, pending.left_behind() as found:
        assert len(found) == 1


def test_a_damaged_store_is_begun_anew_and_others_cannot_look(tmp_path: Path) -> None:
    keep(tmp_path / "p", "old")
    [store] = (tmp_path / "p").glob("*/records/cache.db")
    store.write_bytes(b"x" * 5000)
    for extra in store.parent.glob("cache.db-*"):
        extra.unlink()
    assert left(tmp_path / "p") == []
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o700


def test_a_full_disk_costs_nothing_but_this_safety(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    first, _ = lease_two(queue)
    with open_pending(tmp_path, URL, "old") as pending:
        monkeypatch.setattr(pending._store, "set", full)
        pending.follow([held(first, 0)], away=True)
        pending.follow([], away=False)
    assert left(tmp_path) == []
