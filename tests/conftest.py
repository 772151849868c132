"""Fixtures: a real server for the session, flushed for each test; a queue on it; a scene to break.

At the end of a run of the fault tests a table says what each fault cost.
"""

from __future__ import annotations

import dataclasses
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
from chaos_tools import RUN_VARIABLE, Report, Scene, end_processes
from queue_tools import LocalServer, Start, WorkerProcess

from dflash_batch.worker.queue import Queue, connect


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[LocalServer]:
    # a short path: a socket's name has at most about 100 bytes
    with tempfile.TemporaryDirectory(prefix="dfb-") as folder:
        server = LocalServer(Path(folder))
        server.start()
        yield server
        server.kill()


@pytest.fixture(scope="session")
def valkey_url(valkey_server: LocalServer) -> str:
    return valkey_server.url


@pytest.fixture
def redis_client(valkey_url: str) -> Iterator[redis.Redis]:
    client = connect(valkey_url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture(params=["valkey", "fakeredis"])
def queue_on_either(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Iterator[Queue]:
    """A queue on a real server, and one on the imitation."""
    if request.param == "valkey":
        yield Queue(redis_client)
    else:
        fake = fakeredis.FakeRedis()
        yield Queue(fake)
        fake.close()


@pytest.fixture
def queue(redis_client: redis.Redis) -> Queue:
    return Queue(redis_client)


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


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that the test started outlives it."""
    run = uuid.uuid4().hex
    monkeypatch.setenv(RUN_VARIABLE, run)
    yield
    left = end_processes(run)
    assert not left, f"processes were left behind: {left}"


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """What a fault cost: a line of the table."""
    found = Report()
    yield found
    request.node.user_properties.append(("report", dataclasses.asdict(found)))


@pytest.fixture
def scene(nothing_left: None, report: Report) -> Iterator[Scene]:
    """A server of the test's own, and what it needs to break things."""
    with tempfile.TemporaryDirectory(prefix="dfb-") as folder:
        server = LocalServer(Path(folder))
        server.start()
        scene = Scene(Path(folder), server, report)
        try:
            yield scene
        finally:
            scene.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    if mark := item.get_closest_marker("fault"):
        outcome.get_result().user_properties.append(("fault", mark.args))  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if "fault" not in str(config.option.markexpr):
        return
    lines = []
    stats = terminalreporter.stats
    failed = {found.nodeid for kind in ("failed", "error") for found in stats.get(kind, ())}
    for found in (one for kind in ("", "error") for one in stats.get(kind, ())):
        facts = dict(found.user_properties)  # complete only after the teardown
        if found.when == "teardown" and "fault" in facts and "report" in facts:
            number, text = facts["fault"]
            lines.append((number, text, facts["report"], found.nodeid in failed))
    terminalreporter.section("faults")
    write = terminalreporter.write_line
    write(f"{'#':>3} {'fault':<62} {'rows':>7} {'kills':>5} {'lost':>5} {'twice':>5} {'worst':>7}")
    for number, text, cost, bad in sorted(lines, key=lambda line: (line[0], line[1])):
        end = "  FAILED" if bad else ""
        worst = f"{cost['worst_s']:.1f} s" if cost["worst_s"] else "-"
        write(
            f"{number:>3} {text:<62} {cost['rows']:>7,} {cost['kills']:>5} "
            f"{cost['lost']:>5} {cost['duplicated']:>5} {worst:>7}{end}"
        )
