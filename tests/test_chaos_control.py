"""Who interferes: cancel, suspend, look; many rows, a small batch, and a run with a real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from chaos_tools import BATCH, Scene, fault
from queue_tools import MODEL, all_results, assert_settled, done, row, submit, until

from dflash_batch.worker.contract import TEXT, JobSpec, Key, ModelRef
from dflash_batch.worker.mirror import JSONSerializer
from dflash_batch.worker.settings import ENGINE_COMMAND

# after mirror: it sets RQ's key prefix
from rq.registry import FailedJobRegistry  # isort: skip
from rq.suspension import resume, suspend  # isort: skip

VECTORS = Path(__file__).parent / "vectors" / "dflash-qwen3-tiny"


@fault(22, "cancel while workers hold shards", slow=True)
def test_cancel_frees_the_slots_and_late_commits_count_for_nothing(scene: Scene) -> None:
    submit(scene.queue, [row(i) for i in range(64)], batch_id="batch_b", shard_rows=8)
    worker = scene.worker("--step-s", "0.2")
    until(lambda: "leased" in worker.says, "shards are held")
    [lease] = scene.queue.lease("late", MODEL.key, 60_000, 1)
    scene.queue.cancel("batch_b")
    assert scene.queue.commit(lease, [done(lease.pending[0])]).fenced
    rows = scene.submit(16, shard_rows=8)
    scene.done()
    until(lambda: "why=cancelled" in worker.says, "the worker has noticed")
    assert_settled(scene.queue, "batch_b")
    scene.check(rows)


@fault(23, "suspend and resume", slow=True)
def test_nothing_is_leased_while_work_is_suspended(scene: Scene) -> None:
    rows = scene.submit(64, shard_rows=8)
    worker = scene.worker("--step-s", "0.1", max_batch=4)
    scene.answered(4)
    suspend(scene.queue.client)
    until(lambda: "suspended" in worker.says, "the worker has noticed")
    until(lambda: not scene.held_by(worker), "what is in hand is finished")
    recorded = len(scene.answers)
    assert recorded % 8 == 0
    assert recorded < len(rows)
    leased = worker.says.count("leased shard")
    pause = time.monotonic() + 1.0
    until(lambda: time.monotonic() > pause, "it had time to lease")
    assert worker.says.count("leased shard") == leased
    resume(scene.queue.client)
    scene.done()
    scene.check(rows)


@fault(31, "`rq info` all the time, while a worker and the server are killed", slow=True)
def test_a_viewer_changes_nothing(scene: Scene) -> None:
    rows = scene.submit(96, shard_rows=8)
    assert scene.queue.mirror is not None
    view = scene.queue.mirror.queue
    looking = "import os, subprocess, sys\nwhile True: subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-m", "rq.cli", "info", "-u", scene.server.url]
    viewer = subprocess.Popen(
        [sys.executable, "-c", looking, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RQ_KEY_PREFIX": Key.RQ_PREFIX},
        start_new_session=True,
    )
    try:
        victim = scene.worker("--step-s", "0.1")
        until(lambda: len(scene.held_by(victim)) > 0, "the victim holds shards")
        scene.worker("--step-s", "0.1")
        scene.kill(victim)
        view.started_job_registry.get_job_ids(cleanup=True)
        scene.answered(30)
        scene.kill_server()
        scene.restart_server()
        until(lambda: scene.look() or scene.is_done, "what the dead held is in other hands")
        scene.done()
    finally:
        os.killpg(viewer.pid, signal.SIGKILL)
        viewer.wait()
    failed = FailedJobRegistry(Key.QUEUE, connection=view.connection, serializer=JSONSerializer)
    assert failed.get_job_ids(cleanup=True) == []
    scene.check(rows)


@fault(32, "many rows, several workers, ten kills", slow=True)
def test_many_rows_and_ten_kills(scene: Scene) -> None:
    count = int(os.environ.get("DFLASH_BATCH_CHAOS_ROWS", "20000"))
    client = scene.queue.client
    before = client.info("memory")["used_memory"]
    rows = scene.submit(count, shard_rows=32)
    queued = (client.info("memory")["used_memory"] - before) / count
    assert queued < 1.2 * 364, f"{queued:.0f} bytes a row"
    random = Random(1)
    alive = [scene.worker(max_batch=32, lease_ttl_s=2.0) for _ in range(3)]
    for kill in range(10):
        goal = count * (kill + 1) // 12
        while _recorded(scene) < goal:
            scene.look()
            time.sleep(0.05)
        scene.kill(alive.pop(random.randrange(len(alive))))
        alive.append(scene.worker(max_batch=32, lease_ttl_s=2.0))
    scene.recovered(60)
    scene.done(240)
    scene.check(rows)


@fault(33, "a small batch behind a large one", slow=True)
def test_a_small_batch_does_not_wait_for_a_large_one(scene: Scene) -> None:
    submit(scene.queue, [row(i) for i in range(4000)], batch_id="batch_b", shard_rows=8)
    for _ in range(2):
        scene.worker("--step-s", "0.02", max_batch=8)
    until(lambda: len(all_results(scene.queue, "batch_b")) > 50, "the large one is in work")
    rows = scene.submit(64, shard_rows=8)
    scene.done()
    small = scene.queue.status(BATCH)
    assert small is not None
    assert small.sealed is not None
    assert small.finished is not None
    span = (int(1000 * small.sealed), int(1000 * small.finished))  # stream ids are milliseconds
    served = len(scene.queue.client.xrange(Key.results("batch_b"), *span))
    in_hand = 2 * (2 * 8 + 8)  # held by the workers when the small one came
    assert served <= 2 * 64 + in_hand, f"{served} rows of the other batch came first"
    scene.check(rows)


@fault(19, "kill -9 of engines, workers and server, with a real model", slow=True)
def test_a_real_model_gives_the_same_tokens_whatever_is_killed(scene: Scene) -> None:
    draft = VECTORS / "draft-b4"
    cases = json.loads((draft / "expected" / "cases.json").read_text())
    cases = [case for case in cases if case["block_size"] is None]
    model = ModelRef(target=str(VECTORS / "target"), draft=str(draft), dtype="float32")
    rows = [_case_row(n, cases[n % len(cases)]) for n in range(12 * len(cases))]
    submit(scene.queue, rows, shard_rows=4, model=model)
    real: dict[str, Any] = {
        "model": model,
        "engine_command": ENGINE_COMMAND,
        "max_batch": 4,
        "lease_ttl_s": 2.0,
    }
    worker = scene.worker(**real)
    scene.answered(4)
    os.kill(worker.engine_pid(), signal.SIGKILL)
    scene.report.kills += 1
    scene.answered(12)
    scene.kill(worker)
    second = scene.worker(**real)
    scene.recovered(60)
    scene.answered(24)
    scene.kill_server()
    until(lambda: "queue_away" in second.says, "it is noticed")
    scene.restart_server()
    scene.done(200)
    assert_settled(scene.queue, BATCH)
    scene.report.rows = len(rows)
    for result in scene.answers:
        assert result.response is not None
        tokens = result.response["body"]["choices"][0]["token_ids"]
        assert tokens == cases[result.index % len(cases)]["expected_new_tokens"]


def _recorded(scene: Scene) -> int:
    status = scene.queue.status(BATCH)
    assert status is not None
    return status.total - status.left


def _case_row(index: int, case: dict[str, object]) -> JobSpec:
    return JobSpec.model_validate(
        {
            "index": index,
            "line": index + 1,
            "custom_id": f"q-{index}",
            "endpoint": TEXT,
            "prompts": [case["prompt"]],
            "max_tokens": case["max_new_tokens"],
            "stop_token_ids": case["stop_token_ids"] or [],
            "ignore_eos": True,
            "return_token_ids": True,
        }
    )
