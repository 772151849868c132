"""What tests of the gateway share: the server in a process of its own, with a fake engine.

Run as `python gateway_tools.py JSON` it is that process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from queue_tools import FAKE_ENGINE, MODEL

from dflash_batch.worker import log
from dflash_batch.worker.contract import CHAT
from dflash_batch.worker.gateway.app import Options
from dflash_batch.worker.gateway.guard import read_tokens
from dflash_batch.worker.gateway.serve import Place, serve
from dflash_batch.worker.settings import WorkerSettings


def answer_to(text: str) -> str:
    """What the fake engine says to one message of a user."""
    return f"{zlib.crc32(f'user: {text}'.encode()):08x}"


async def ask_many(url: str, count: int) -> dict[str, str]:
    """The answers to `count` live requests made at once, by what was asked."""
    limits = httpx.Limits(max_connections=count)

    async def one(client: httpx.AsyncClient, text: str) -> tuple[str, str]:
        messages = [{"role": "user", "content": text}]
        body = {"model": "fake", "max_tokens": 8, "messages": messages}
        answer = await client.post(f"{url}{CHAT}", json=body)
        answer.raise_for_status()
        return text, answer.json()["choices"][0]["message"]["content"]

    async with httpx.AsyncClient(limits=limits, timeout=300) as client:
        return dict(await asyncio.gather(*(one(client, f"caller {n}") for n in range(count))))


class ServerProcess:
    """A real server; with `engine`, options of the fake engine, also a worker."""

    def __init__(
        self, home: Path, url: str | None, *engine: str, worker: bool = True, tokens: str = ""
    ) -> None:
        given = {
            "home": str(home),
            "url": url,
            "engine": engine,
            "worker": worker,
            "tokens": tokens,
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(given)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the server did not start"

    def client(self, key: str = "none", retries: int = 0) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=retries, timeout=60)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """The exit status after a signal."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        status = self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


@contextmanager
def serving(home: Path, url: str | None, *engine: str, **more: Any) -> Iterator[ServerProcess]:
    """A server that has to stop cleanly at the end."""
    server = ServerProcess(home, url, *engine, **more)
    try:
        yield server
    except BaseException:
        server.stop(signal.SIGKILL)
        raise
    assert server.stop() in (0, -signal.SIGKILL)


def main(given: dict[str, Any]) -> None:
    log.set_up("WARNING")
    settings = WorkerSettings(
        redis_url="", model=MODEL, max_batch=8, engine_command=(*FAKE_ENGINE, *given["engine"])
    )
    tokens = read_tokens(Path(given["tokens"])) if given["tokens"] else frozenset()
    options = Options(Path(given["home"]), "", (MODEL,), tokens)
    serve(
        Place("127.0.0.1", 0, given["url"]),
        options,
        settings if given["worker"] else None,
        lambda url: print(url, flush=True),
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
