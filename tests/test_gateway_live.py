"""Many live requests at once, slow callers and callers that vanish."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_tools import ServerProcess, answer_to, ask_many, serving
from queue_tools import until

from dflash_batch.worker.contract import CHAT
from dflash_batch.worker.queue import Queue


@pytest.fixture
def server(tmp_path: Path, valkey_url: str, queue: Queue) -> Iterator[ServerProcess]:
    with serving(tmp_path, valkey_url) as server:
        yield server


def body(text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "fake", "max_tokens": 8, "messages": messages}).encode()


def raw(server: ServerProcess, length: int) -> tuple[socket.socket, bytes]:
    """A connection of its own, and the head of a call with a body of `length` bytes."""
    name, _, port = server.url.removeprefix("http://").rpartition(":")
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {name}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    return socket.create_connection((name, int(port))), head.encode()


def test_answers_of_many_at_once_are_not_mixed_up(server: ServerProcess) -> None:
    slow, head = raw(server, 1000)
    with slow:
        slow.sendall(head + b"{")  # and no more: it holds nothing up
        found = asyncio.run(ask_many(server.url, 200))
    assert found == {f"caller {n}": answer_to(f"caller {n}") for n in range(200)}


def test_the_row_of_a_caller_that_vanished_is_taken_out(
    tmp_path: Path, valkey_url: str, queue: Queue
) -> None:
    with serving(tmp_path, valkey_url, worker=False) as server:
        text = body("gone")
        caller, head = raw(server, len(text))
        with caller:
            caller.sendall(head + text)
            until(lambda: bool(queue.unfinished()), "the row is queued")
        until(lambda: not queue.unfinished(), "the row is taken out")
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
