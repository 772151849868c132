"""Workers that share, try again, drain and rest: real processes with a fake engine."""

from __future__ import annotations

from pathlib import Path

from queue_tools import (
    Start,
    all_results,
    assert_settled,
    is_done,
    row,
    submit,
    until,
)

from dflash_batch.worker.contract import Key
from dflash_batch.worker.queue import Queue


def test_an_idle_worker_gets_rows_that_another_has_not_started(queue: Queue, start: Start) -> None:
    rows = [row(i) for i in range(32)]
    workers = [start("--step-s", "0.05", max_batch=2) for _ in range(2)]
    until(lambda: all("engine_ready" in worker.says for worker in workers), "both are ready")
    submit(queue, rows, shard_rows=32)
    until(lambda: is_done(queue), "the batch is done")
    shares = [
        sum(result.metrics.worker == info.name for result in all_results(queue))
        for info in queue.workers()
    ]
    assert sum(shares) == 32
    assert min(shares) >= 8, "the one that came late did its part"
    assert "given_back" in workers[0].says + workers[1].says
    status = queue.status("batch_a")
    assert status is not None
    assert status.shards > 1
    assert_settled(queue)


def test_a_row_that_found_no_memory_is_tried_again_later(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    submit(queue, [row(0), row(1, "tight"), row(2)])
    worker = start("--once", str(tmp_path / "once"), burst=True)
    until(lambda: queue.client.zcard(Key.LATER) == 1, "the row waits")
    until(lambda: len(all_results(queue)) == 2, "its neighbours are done")
    (waiting,) = queue.client.zrange(Key.LATER, 0, -1)
    queue.client.zadd(Key.LATER, {waiting: 1})  # its pause is over
    assert worker.wait() == 0
    assert_settled(queue)
    results = {result.index: result for result in all_results(queue)}
    assert all(result.ok for result in results.values())
    assert [results[index].metrics.attempts for index in range(3)] == [1, 2, 1]
    assert "tried_later" in worker.says


def test_a_row_that_never_finds_memory_fails_after_its_last_attempt(
    queue: Queue, start: Start
) -> None:
    submit(queue, [row(0, "tight")])
    worker = start(burst=True)
    for waiting in ("batch_a-0_1_0", "batch_a-0_1_0_1_0"):  # a shard of its own each time
        until(lambda: queue.client.zscore(Key.LATER, waiting) is not None, "it waits")  # noqa: B023
        queue.client.zadd(Key.LATER, {waiting: 1})
    assert worker.wait() == 0
    (result,) = all_results(queue)
    assert (result.ok, result.code, result.metrics.attempts) == (False, "out_of_memory", 3)
    assert [(spec.index, code) for spec, code in queue.failures("batch_a")] == [
        (0, "out_of_memory")
    ]
    assert_settled(queue)


def test_a_worker_that_is_to_drain_finishes_what_it_holds_and_ends(
    queue: Queue, start: Start
) -> None:
    submit(queue, [row(i) for i in range(60)])
    worker = start("--step-s", "0.05", max_batch=4)
    until(lambda: len(all_results(queue)) >= 4, "it works")
    (info,) = queue.workers()
    queue.drain(info.name, float("inf"))
    assert worker.wait() == 0
    status = queue.status("batch_a")
    assert status is not None
    assert 0 < status.left < 60
    assert status.leased == 0
    assert "released" not in worker.says, "it has finished its rows"
    assert queue.workers() == []
    assert start(burst=True).wait() == 0
    assert_settled(queue)


def test_a_paused_batch_rests_and_goes_on(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(60)])
    start("--step-s", "0.05", max_batch=4)
    until(lambda: len(all_results(queue)) >= 4, "it works")
    assert queue.pause("batch_a")

    def held() -> int:
        status = queue.status("batch_a")
        assert status is not None
        return status.leased

    until(lambda: held() == 0, "what was in hand is done")
    assert not is_done(queue)
    assert queue.resume("batch_a")
    until(lambda: is_done(queue), "the batch is done")
    assert_settled(queue)
