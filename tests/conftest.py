"""Fixtures: a real server for the session, flushed for each test; a queue on it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
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


@pytest.fixture
def queue(redis_client: redis.Redis) -> Queue:
    return Queue(redis_client)


@pytest.fixture
def start(valkey_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts workers; they and their engines are ended with the test."""
    workers: list[WorkerProcess] = []

    def start_one(*engine_options: str, **settings: object) -> WorkerProcess:
        log = tmp_path / f"worker-{len(workers)}.log"
        worker = WorkerProcess(valkey_url, *engine_options, log=log, **settings)
        workers.append(worker)
        return worker

    yield start_one
    for worker in workers:
        worker.kill()
