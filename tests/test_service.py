"""Workers as processes, with an engine that computes: what they do, and how they survive."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from queue_tools import (
    MODEL,
    LocalServer,
    WorkerProcess,
    all_results,
    assert_settled,
    expected,
    is_done,
    row,
    submit,
    until,
)

from dflash_batch.worker import main
from dflash_batch.worker.contract import JobSpec, Key, ModelRef, RowStatus
from dflash_batch.worker.mirror import BaseWorker, JSONSerializer
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.settings import WorkerSettings

# after mirror: it sets RQ's key prefix
from rq.command import send_shutdown_command  # isort: skip
from rq.suspension import resume, suspend  # isort: skip

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(valkey_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts workers; they and their engines are ended with the test."""
    workers: list[WorkerProcess] = []

    def start_one(*engine_options: str, **settings: Any) -> WorkerProcess:
        log = tmp_path / f"worker-{len(workers)}.log"
        worker = WorkerProcess(valkey_url, *engine_options, log=log, **settings)
        workers.append(worker)
        return worker

    yield start_one
    for worker in workers:
        worker.kill()


def answered(queue: Queue, count: int) -> Callable[[], bool]:
    return lambda: len(all_results(queue)) >= count


def check_answers(queue: Queue, rows: list[JobSpec]) -> None:
    assert_settled(queue)
    for result in all_results(queue):
        assert result.response is not None
        content = result.response["body"]["choices"][0]["message"]["content"]
        assert content == expected(rows[result.index])


def prompts_run(journal: Path) -> Counter[str]:
    return Counter(line.removeprefix("user: ") for line in journal.read_text().splitlines())


def test_a_burst_worker_answers_everything_and_ends(queue: Queue, start: Start) -> None:
    rows = [row(i) for i in range(50)]
    submit(queue, rows, shard_rows=8)
    worker = start(burst=True)
    assert worker.wait() == 0
    check_answers(queue, rows)
    assert queue.workers() == []
    (first, *_) = all_results(queue)
    assert first.metrics.worker.startswith(os.uname().nodename)
    assert first.metrics.attempts == 1
    assert "engine_ready target=fake" in worker.says
    assert "question" not in worker.says, "no prompt is logged"


def test_a_private_worker_does_its_batch_alone_and_ends(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(8)], batch_id="batch_b")
    submit(queue, [row(i) for i in range(8)], batch_id="batch_a")
    assert start(batch_id="batch_a").wait() == 0
    assert_settled(queue)
    other = queue.status("batch_b")
    assert other is not None
    assert other.left == 8


def test_a_worker_without_model_loads_what_is_wanted(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(4)])
    submit(queue, [row(i) for i in range(4)], batch_id="batch_b", model=ModelRef(target="other"))
    assert start(model=None, burst=True).wait() == 0
    assert_settled(queue)
    assert_settled(queue, "batch_b")


def test_two_workers_share_a_batch(queue: Queue, start: Start) -> None:
    rows = [row(i) for i in range(120)]
    submit(queue, rows)
    for worker in [start("--step-s", "0.02", burst=True) for _ in range(2)]:
        assert worker.wait() == 0
    check_answers(queue, rows)
    workers = Counter(result.metrics.worker for result in all_results(queue))
    assert len(workers) == 2


def test_a_bad_prompt_fails_alone(queue: Queue, start: Start) -> None:
    submit(queue, [row(0), row(1, "x" * 5000), row(2)])
    assert start(burst=True).wait() == 0
    assert_settled(queue)
    by_index = {result.index: result for result in all_results(queue)}
    assert [by_index[i].ok for i in range(3)] == [True, False, True]
    assert by_index[1].code == "context_length_exceeded"
    assert by_index[1].response is not None
    assert by_index[1].response["status_code"] == 400
    assert by_index[1].response["body"]["error"]["param"] == "messages"


def test_kill_of_a_worker_is_survived_and_no_row_runs_again_that_was_recorded(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    rows = [row(i) for i in range(40)]
    submit(queue, rows, shard_rows=20)
    first = start("--step-s", "0.1", lease_ttl_s=1.0)
    until(answered(queue, 4), "some rows are recorded")
    engine = first.engine_pid()
    first.kill()
    recorded = {f"question {result.index}" for result in all_results(queue)}
    until(lambda: _gone(engine), "the engine has followed its supervisor")
    journal = tmp_path / "journal"
    second = start("--journal", str(journal), burst=True)
    assert second.wait() == 0
    check_answers(queue, rows)
    again = prompts_run(journal)
    assert not again.keys() & recorded
    assert set(again.values()) == {1}


def test_kill_of_an_engine_is_survived(queue: Queue, start: Start) -> None:
    rows = [row(i) for i in range(40)]
    submit(queue, rows, shard_rows=8)
    worker = start("--step-s", "0.05", burst=True)
    until(answered(queue, 4), "some rows are recorded")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    assert worker.wait() == 0
    check_answers(queue, rows)
    assert worker.says.count("engine_started") == 2
    assert "killed by SIGKILL" in worker.says


def test_an_error_in_a_step_restarts_the_engine(queue: Queue, start: Start, tmp_path: Path) -> None:
    rows = [row(i) for i in range(12)]
    submit(queue, rows)
    worker = start("--fail", "question 5", "--once", str(tmp_path / "failed"), burst=True)
    assert worker.wait() == 0
    check_answers(queue, rows)
    assert "RuntimeError: the fake decoder was told to fail" in worker.says


def test_a_row_that_kills_engines_is_condemned_and_its_neighbours_are_answered(
    queue: Queue, start: Start
) -> None:
    rows = [row(i, "poison" if i == 6 else None) for i in range(24)]
    submit(queue, rows, shard_rows=8)
    worker = start("--crash", "poison", burst=True)
    assert worker.wait(40) == 0
    assert_settled(queue)
    results = {result.index: result for result in all_results(queue)}
    assert [index for index, result in results.items() if not result.ok] == [6]
    assert results[6].status is RowStatus.POISON
    assert results[6].code == "worker_lost"
    assert worker.says.count("engine_started") <= 4


def test_an_engine_that_stands_still_is_replaced(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    rows = [row(i) for i in range(8)]
    submit(queue, rows)
    once = tmp_path / "hung"
    worker = start("--hang", "question 3", "--once", str(once), burst=True, stall_timeout_s=1.5)
    assert worker.wait() == 0
    check_answers(queue, rows)
    assert "engine_stalled" in worker.says


def test_sigterm_finishes_the_rows_in_hand(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(200)], shard_rows=8)
    worker = start("--step-s", "0.05")
    until(answered(queue, 8), "some rows are recorded")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    status = queue.status("batch_a")
    assert status is not None
    assert status.leased == 0
    assert 0 < status.left < 200
    assert status.left % 8 == 0, "whole shards were finished"
    assert queue.workers() == []
    assert "released" not in worker.says


def test_sigterm_releases_what_the_grace_does_not_cover(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(40)], shard_rows=8)
    worker = start("--step-s", "2", grace_s=0.3)
    until(lambda: "leased" in worker.says, "a shard is leased")
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0
    assert "released" in worker.says
    assert start(burst=True).wait() == 0
    assert_settled(queue)
    assert {result.metrics.attempts for result in all_results(queue)} <= {1, 2}


def test_a_second_signal_releases_at_once(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(40)], shard_rows=8)
    worker = start("--step-s", "0.5")
    until(lambda: "leased" in worker.says, "a shard is leased")
    worker.signal(signal.SIGTERM)
    sent = time.monotonic()
    until(lambda: time.monotonic() - sent > 1.1, "the first signal is not doubled by chance")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert "released" in worker.says


def test_a_worker_ends_with_its_parent(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(40)], shard_rows=8)
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    worker = start("--step-s", "0.1", parent_pid=child)
    until(lambda: "leased" in worker.says, "a shard is leased")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert worker.wait() == 0
    assert "parent_gone" in worker.says
    status = queue.status("batch_a")
    assert status is not None
    assert status.leased == 0


def test_a_sleeper_keeps_its_shards_when_nobody_took_them(queue: Queue, start: Start) -> None:
    rows = [row(i) for i in range(30)]
    submit(queue, rows, shard_rows=10)
    worker = start("--step-s", "0.05", burst=True, lease_ttl_s=0.6)
    until(answered(queue, 2), "some rows are recorded")
    worker.signal(signal.SIGSTOP)
    until(lambda: queue.reap() > 0, "its leases have run out")
    worker.signal(signal.SIGCONT)
    assert worker.wait() == 0
    check_answers(queue, rows)
    assert {result.metrics.attempts for result in all_results(queue)} == {1}


def test_a_zombie_records_nothing_once_its_shards_were_taken(queue: Queue, start: Start) -> None:
    rows = [row(i) for i in range(30)]
    submit(queue, rows, shard_rows=30)
    zombie = start("--step-s", "0.05", lease_ttl_s=0.6)
    until(answered(queue, 2), "some rows are recorded")
    zombie.signal(signal.SIGSTOP)
    before = len(all_results(queue))
    second = start("--step-s", "0.05", burst=True)
    until(answered(queue, before + 4), "the second worker has taken over")
    zombie.signal(signal.SIGCONT)
    assert second.wait() == 0
    check_answers(queue, rows)
    until(lambda: "lost shard" in zombie.says, "the zombie has noticed")
    assert zombie.is_running
    late = [result for result in all_results(queue)[before:] if result.metrics.attempts == 1]
    assert late == []


def test_a_model_that_cannot_be_loaded_ends_a_private_worker_with_a_reason(
    queue: Queue, start: Start
) -> None:
    missing = ModelRef(target="missing")
    submit(queue, [row(0)], model=missing)
    worker = start(model=missing, batch_id="batch_a")
    assert worker.wait() == 4
    assert worker.says.splitlines()[-1] == "there is no model missing"
    status = queue.status("batch_a")
    assert status is not None
    assert status.left == 1


def test_a_model_that_cannot_be_loaded_parks_a_shared_worker(queue: Queue, start: Start) -> None:
    submit(queue, [row(0)], model=ModelRef(target="missing"))
    submit(queue, [row(0)], batch_id="batch_b")
    worker = start(model=None)
    until(lambda: is_done(queue, "batch_b"), "the other batch is served")
    assert "parked" in worker.says
    assert worker.is_running
    parked = start(model=ModelRef(target="missing"))
    until(lambda: any(info.state == "parked" for info in queue.workers()), "it says it is parked")
    (info,) = [info for info in queue.workers() if info.state == "parked"]
    assert info.note == "there is no model missing"
    assert parked.is_running


def test_cancel_frees_the_worker(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(16)], shard_rows=8)
    worker = start("--step-s", "0.3", lease_ttl_s=1.0)
    until(lambda: "leased" in worker.says, "a shard is leased")
    queue.cancel("batch_a")
    submit(queue, [row(i) for i in range(4)], batch_id="batch_b")
    until(lambda: is_done(queue, "batch_b"), "the next batch is served")
    assert_settled(queue)
    assert "why=cancelled" in worker.says


def test_rq_shows_the_truth_and_its_commands_are_obeyed(queue: Queue, start: Start) -> None:
    assert queue.mirror is not None
    view = queue.mirror.queue
    submit(queue, [row(i) for i in range(40)], shard_rows=8)
    assert (view.count, view.started_job_registry.count) == (5, 0)

    worker = start("--step-s", "0.1", max_batch=4, lease_ttl_s=2.0)
    until(lambda: view.finished_job_registry.count >= 1, "a shard is finished")
    counts = (
        view.count,
        view.started_job_registry.get_job_count(cleanup=True),
        view.finished_job_registry.count,
    )
    assert sum(counts) in (4, 5, 6), f"{counts} of 5, one may be moving"
    (seen,) = BaseWorker.all(connection=queue.client, serializer=JSONSerializer)
    assert seen.get_state() == "busy"
    assert seen.pid == worker.pid

    suspend(queue.client)
    until(lambda: "suspended" in worker.says, "the worker has noticed")
    until(lambda: _leased(queue) == 0, "what was in hand is done")
    left = view.count
    assert left == len(queue.client.lrange(Key.ready("batch_a"), 0, -1))
    resume(queue.client)
    until(lambda: is_done(queue), "the batch is done")
    until(lambda: view.finished_job_registry.count == 5, "RQ shows all shards finished")
    assert view.count == view.started_job_registry.count == 0
    send_shutdown_command(queue.client, seen.name)
    assert worker.wait() == 0
    assert BaseWorker.all(connection=queue.client, serializer=JSONSerializer) == []
    assert_settled(queue)


def test_an_rq_worker_cannot_run_our_jobs_by_mistake(queue: Queue) -> None:
    submit(queue, [row(0)])
    assert queue.mirror is not None
    (job,) = queue.mirror.queue.jobs
    with pytest.raises(RuntimeError, match="not for an RQ worker"):
        job.perform()


def test_the_view_is_repaired_after_a_crash_between_the_two(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(16)], shard_rows=8)
    worker = start("--step-s", "0.2", max_batch=8, lease_ttl_s=0.8)
    assert queue.mirror is not None
    registry = queue.mirror.queue.started_job_registry
    until(lambda: registry.get_job_count(cleanup=False) >= 1, "RQ shows a shard as started")
    worker.kill()
    assert start(burst=True).wait() == 0
    assert_settled(queue)
    assert registry.get_job_count(cleanup=False) == 0


def test_a_server_killed_in_mid_run_is_survived() -> None:
    with tempfile.TemporaryDirectory(prefix="dfb-") as folder:
        server = LocalServer(Path(folder))
        server.start()
        queue = Queue(connect(server.url))
        rows = [row(i) for i in range(60)]
        submit(queue, rows, shard_rows=10)
        journal = Path(folder) / "journal"
        worker = WorkerProcess(
            server.url, "--step-s", "0.05", "--journal", str(journal), log=Path(folder) / "log"
        )
        try:
            until(answered(queue, 8), "some rows are recorded")
            server.kill()
            until(lambda: "queue_away" in worker.says, "the worker has noticed")
            server.start()
            until(lambda: is_done(queue), "the batch is done")
            check_answers(queue, rows)
            assert set(prompts_run(journal).values()) == {1}, "nothing was run twice"
            assert worker.is_running
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0
        finally:
            worker.kill()
            server.kill()


def test_a_server_that_lost_everything_is_survived(queue: Queue, start: Start) -> None:
    submit(queue, [row(i) for i in range(40)], shard_rows=8)
    worker = start("--step-s", "0.1", lease_ttl_s=1.0)
    until(answered(queue, 4), "some rows are recorded")
    queue.client.flushall()
    rows = [row(i) for i in range(8)]
    until(lambda: "why=lost" in worker.says, "the worker has noticed")
    submit(queue, rows)
    until(lambda: is_done(queue), "the new batch is done")
    check_answers(queue, rows)
    until(lambda: bool(queue.workers()), "the worker has said again that it is there")
    assert worker.is_running


def test_a_queue_that_is_not_there_ends_a_worker_with_its_own_status(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "_PATIENCE_S", 0.0)
        settings = WorkerSettings(redis_url=f"unix://{tmp_path}/none", model=MODEL)
        assert main.run_worker(settings) == 5


def _leased(queue: Queue) -> int:
    status = queue.status("batch_a")
    assert status is not None
    return status.leased


def _gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").exists() and " Z " in Path(f"/proc/{pid}/stat").read_text()
    return True
