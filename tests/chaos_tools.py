"""What the fault tests share: a scene to break things in, and the one check that nothing was lost.

The check is the same for every fault: each row has exactly one terminal record in the queue and
one line in the file, the counters agree with a recount, no lease is left and RQ shows nothing
open; no process is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from proxy import Proxy
from queue_tools import (
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

from dflash_batch.worker.contract import JobSpec, Key, RowResult
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.results import ResultFiles, Tail

BATCH = "batch_a"
RUN_VARIABLE = "DFLASH_BATCH_TEST_RUN"
"""Marks every process that a test run starts, so that one left behind is found."""

_F = TypeVar("_F", bound=Callable[..., object])


def fault(number: int, text: str, *, slow: bool = False) -> Callable[[_F], _F]:
    """Mark a test as one of the fault plan. `slow` ones run in `make chaos` only."""

    def mark(test: _F) -> _F:
        for chosen in [pytest.mark.fault(number, text)] + [pytest.mark.chaos] * slow:
            chosen(test)
        return test

    return mark


@dataclass
class Report:
    """One line of the table."""

    rows: int = 0
    kills: int = 0
    lost: int = 0
    duplicated: int = 0
    worst_s: float = 0.0  # longest time until what a victim held was in other hands


@dataclass
class _Orphans:
    """Shards of a killed worker, with their epoch at its death."""

    shards: dict[str, bytes]
    since: float


@dataclass
class Scene:
    """A server of its own, workers and proxies on it, all of them gone at the end."""

    folder: Path
    server: LocalServer
    report: Report = field(default_factory=Report)
    workers: list[WorkerProcess] = field(default_factory=list)
    _orphans: list[_Orphans] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._stack.callback(self.server.kill)
        self.queue = Queue(connect(self.server.url))
        self._stack.callback(self.queue.client.close)

    def worker(self, *engine: str, url: str | None = None, **settings: Any) -> WorkerProcess:
        """One more worker; `settings` are of its own, and a `preamble` (see WorkerProcess)."""
        name = f"w{len(self.workers)}-{uuid.uuid4().hex[:6]}"
        log = self.folder / f"{name}.log"
        chosen: dict[str, Any] = {"name": name, "lease_ttl_s": 1.0} | settings
        worker = WorkerProcess(url or self.server.url, *engine, log=log, **chosen)
        self._stack.callback(worker.kill)
        self.workers.append(worker)
        return worker

    def proxy(self, **options: Any) -> Proxy:
        return self._stack.enter_context(Proxy(self.folder / "s", **options))

    def submit(self, count: int, *, poison: Collection[int] = (), **options: Any) -> list[JobSpec]:
        rows = [row(i, f"poison {i}" if i in poison else None) for i in range(count)]
        submit(self.queue, rows, **options)
        return rows

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def errors(self) -> Path:
        return self.folder / "errors.jsonl"

    @property
    def answers(self) -> list[RowResult]:
        """The records in the queue now."""
        return all_results(self.queue)

    @property
    def is_done(self) -> bool:
        return is_done(self.queue, BATCH)

    def epoch(self, shard_id: str) -> bytes:
        """How often the shard was leased."""
        value: bytes = self.queue.client.hget(Key.shard(shard_id), "epoch")
        return value

    def answered(self, count: int) -> None:
        """Wait until at least so many rows are recorded."""
        until(lambda: len(self.answers) >= count, f"{count} rows are recorded", 60)

    def done(self, timeout_s: float = 60.0) -> None:
        until(lambda: self.is_done, "the batch is done", timeout_s)

    def held_by(self, worker: WorkerProcess) -> dict[str, bytes]:
        """Shard id -> epoch."""
        key = Key.worker_leases(worker.settings.name or "")
        ids = [shard_id.decode() for shard_id in self.queue.client.smembers(key)]
        return {shard_id: self.epoch(shard_id) for shard_id in ids}

    def kill(self, *victims: WorkerProcess) -> None:
        """kill -9, and note what they held."""
        for victim in victims:
            held = self.held_by(victim)
            victim.kill()
            self.report.kills += 1
            self._orphans.append(_Orphans(held, time.monotonic()))

    def kill_server(self) -> None:
        self.server.kill()
        self.report.kills += 1

    def restart_server(self) -> None:
        """On the same file."""
        self.server.start()

    def look(self) -> bool:
        """Note what the dead held and is in other hands by now. Whether that is all of it."""
        for orphans in list(self._orphans):
            if self._moved(orphans.shards):
                took_s = time.monotonic() - orphans.since
                self.report.worst_s = max(self.report.worst_s, took_s)
                self._orphans.remove(orphans)
        return not self._orphans

    def recovered(self, timeout_s: float = 30.0) -> None:
        """Wait until all that killed workers held is done or in other hands."""
        until(self.look, "what the dead held is in other hands", timeout_s)

    def _moved(self, left: dict[str, bytes]) -> bool:
        client = self.queue.client
        for shard_id, epoch in list(left.items()):
            state, now = client.hmget(Key.shard(shard_id), "st", "epoch")
            if state == b"done" or now != epoch:
                del left[shard_id]
        return not left

    def export(self, rows: Sequence[JobSpec], *, until_done: bool = False) -> None:
        """Bring the results into files, as a client does, and let the queue forget them."""
        numbers = {spec.custom_id: spec.index for spec in rows}
        with ResultFiles(self.output, self.errors, batch_id=BATCH, rows=numbers) as files:
            tail = Tail(self.queue, BATCH, files, "0-0")
            deadline = time.monotonic() + 60
            while tail.pull(100 if until_done else 0) or (until_done and not self.is_done):
                tail.settle()
                assert time.monotonic() < deadline, "the batch does not end"
            tail.settle()
        assert not self.answers, "what is on disk is acknowledged"

    def check(
        self, rows: Sequence[JobSpec], *, poison: Collection[int] = (), exported: bool = False
    ) -> None:
        """The common check, for a batch that was submitted whole and never lost by the server.

        `exported`: the queue has given its records away already.
        """
        assert_settled(self.queue, BATCH, exported=exported)
        for key in self.queue.client.scan_iter(Key.worker("*")):
            assert self.queue.client.pttl(key) > 0, f"{key} would stay for ever"
        self.export(rows)
        check_lines(self.report, rows, self.output, self.errors, poison=poison)

    def close(self) -> None:
        """End all that was started, the last first."""
        self._stack.close()


def check_lines(
    report: Report,
    rows: Sequence[JobSpec],
    output: Path,
    errors: Path,
    *,
    poison: Collection[int] = (),
) -> None:
    """Each row has one line, whole, with the text its prompt calls for; only poison failed."""
    from client_tools import lines_of

    good = lines_of(output)
    bad = lines_of(errors) if errors.exists() else []
    counts = Counter(line["custom_id"] for line in good + bad)
    report.rows += len(rows)
    report.lost += sum(spec.custom_id not in counts for spec in rows)
    report.duplicated += sum(count - 1 for count in counts.values())
    assert (report.lost, report.duplicated) == (0, 0)
    assert set(counts) == {spec.custom_id for spec in rows}
    texts = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in good
    }
    assert {line["custom_id"] for line in bad} == {rows[i].custom_id for i in poison}
    assert texts == {s.custom_id: expected(s) for s in rows if s.index not in poison}


def processes_left(run: str) -> dict[int, str]:
    """Processes of a test run that still exist: process id -> command line."""
    if sys.platform == "darwin":
        command = ["ps", "-AEww", "-o", "pid=,command="]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [line.split(None, 1) for line in listing.splitlines() if run in line]
        found = {int(pid): text for pid, text in lines}
    else:
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if run.encode() in (place / "environ").read_bytes():
                    command_line = (place / "cmdline").read_bytes()
                    found[int(place.name)] = command_line.replace(b"\0", b" ").decode()
            except OSError:  # another user's, or it has just ended
                continue
    found.pop(os.getpid(), None)
    return found


def end_processes(run: str) -> dict[int, str]:
    """What is left of a test run a moment after its end; it is ended, and named."""
    deadline = time.monotonic() + 10
    while (left := processes_left(run)) and time.monotonic() < deadline:
        time.sleep(0.05)  # engines follow their supervisors
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left
