"""The scripts under random histories: every row ends with exactly one record, whatever happens."""

from __future__ import annotations

import fakeredis
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queue_tools import MODEL, all_results, assert_settled, done, ready_shards, row, submit

from dflash_batch.worker.contract import Key, Lease
from dflash_batch.worker.queue import Queue

ROWS = 11
TTL = 60_000
WORKERS = ("ann", "bob", "eve")


class Histories(RuleBasedStateMachine):
    """Workers lease, commit, release, die and wake in any order; old leases are used again.

    The model: who holds which shard at which epoch, and the first record of each row.
    """

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.queue = Queue(self.client, mirror=False)
        self.holder: dict[str, tuple[str, int]] = {}  # shard -> owner, epoch
        self.ran_out: dict[str, tuple[str, int]] = {}  # back in the queue, its last owner
        self.completed: dict[str, tuple[str, int]] = {}
        self.leases: list[Lease] = []  # all that were ever given
        self.records: dict[int, str] = {}
        submit(self.queue, [row(i) for i in range(ROWS)], shard_rows=3)

    def mine(self, lease: Lease) -> bool:
        return self.holder.get(lease.shard.id) == (lease.owner, lease.epoch)

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 3))
    def lease(self, worker: str, count: int) -> None:
        for lease in self.queue.lease(worker, MODEL.key, TTL, count):
            assert lease.shard.id not in self.holder
            assert lease.shard.id not in self.completed
            rows = {spec.index for spec in lease.shard.rows}
            assert set(lease.pending) == rows - self.records.keys()
            self.holder[lease.shard.id] = worker, lease.epoch
            self.ran_out.pop(lease.shard.id, None)
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), twice=st.booleans())
    def commit(self, data: st.DataObject, twice: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        rows = [spec.index for spec in lease.shard.rows]
        chosen = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1))
        text = f"{lease.owner} {lease.epoch}"
        for _ in range(1 + twice):
            fresh = [index for index in chosen if index not in self.records]
            allowed = self.mine(lease) or self.completed.get(lease.shard.id) == (
                lease.owner,
                lease.epoch,
            )
            outcome = self.queue.commit(lease, [done(index, text) for index in chosen])
            assert outcome.fenced != allowed
            assert outcome.accepted == (len(fresh) if allowed else 0)
            assert outcome.duplicates == (len(chosen) - len(fresh) if allowed else 0)
            if allowed:
                self.records |= dict.fromkeys(fresh, text)
                if self.records.keys() >= set(rows):
                    self.completed[lease.shard.id] = lease.owner, lease.epoch
                    self.holder.pop(lease.shard.id, None)
                assert outcome.shard_done == (lease.shard.id in self.completed)
                assert outcome.batch_done == (len(self.records) == ROWS)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), crashed=st.booleans())
    def release(self, data: st.DataObject, crashed: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        held = self.mine(lease)
        assert self.queue.release(lease, crashed=crashed) == held
        if held:
            del self.holder[lease.shard.id]

    @precondition(lambda self: self.holder)
    @rule(data=st.data())
    def run_out(self, data: st.DataObject) -> None:
        shard_id = data.draw(st.sampled_from(sorted(self.holder)))
        self.client.zadd(Key.LEASES, {shard_id: 1})
        assert self.queue.reap() == 1
        self.ran_out[shard_id] = self.holder.pop(shard_id)

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def beat(self, worker: str, data: st.DataObject) -> None:
        """Beats with some leases it had, of which it may have lost any."""
        latest = {lease.shard.id: lease for lease in self.leases if lease.owner == worker}
        told = data.draw(st.lists(st.sampled_from(sorted(latest)), unique=True)) if latest else []
        verdicts = self.queue.beat(worker, TTL, [latest[shard_id] for shard_id in told])
        for shard_id in told:
            claim = worker, latest[shard_id].epoch
            if self.ran_out.get(shard_id) == claim:
                self.holder[shard_id] = self.ran_out.pop(shard_id)
            assert (verdicts[shard_id] == "ok") == (self.holder.get(shard_id) == claim)
        for shard_id, (owner, _) in list(self.holder.items()):
            if owner == worker and shard_id not in told:
                del self.holder[shard_id]  # put back: the worker does not know of it

    @invariant()
    def counts_agree(self) -> None:
        status = self.queue.status("batch_a")
        assert status is not None
        assert status.left == ROWS - len(self.records)
        assert status.ok == len(self.records)
        assert status.leased == len(self.holder) == self.client.zcard(Key.LEASES)
        assert self.client.bitcount(Key.done("batch_a")) == len(self.records)
        ready = ready_shards(self.queue)
        assert (
            len(ready) == len(set(ready)) == status.shards - len(self.holder) - len(self.completed)
        )
        runnable = self.client.zscore(Key.runnable(MODEL.key), "batch_a")
        assert (runnable is not None) == bool(ready)
        for worker in WORKERS:
            members = self.queue.client.smembers(Key.worker_leases(worker))
            held = {shard.decode() for shard in members}
            assert held == {s for s, (owner, _) in self.holder.items() if owner == worker}

    def teardown(self) -> None:
        for shard_id in list(self.holder):
            self.client.zadd(Key.LEASES, {shard_id: 1})
        while leases := self.queue.lease("last", MODEL.key, TTL, 1):
            for lease in leases:
                self.queue.commit(lease, [done(index, "last") for index in lease.pending])
        assert_settled(self.queue)
        for result in all_results(self.queue):
            assert result.response is not None
            assert result.response["body"]["text"] == self.records.get(result.index, "last")


@pytest.mark.parametrize("kind", ["valkey", "fakeredis"])
def test_any_history_ends_with_one_record_a_row(kind: str, redis_client: redis.Redis) -> None:
    client = redis_client if kind == "valkey" else fakeredis.FakeRedis()
    run_state_machine_as_test(
        type("HistoriesHere", (Histories,), {"client": client}),
        settings=settings(
            max_examples=40 if kind == "valkey" else 15,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    client.close()
