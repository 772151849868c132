"""A TCP proxy before the queue's server that does what networks do: cut, hold back, delay, reset.

It runs in a thread of its own and listens on a port of the loopback. With a TLS context it ends
TLS for a server that has none.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

Way = Literal["requests", "replies"]


class Proxy:
    """Use as a context manager. `held` bytes are not lost: like TCP, it delivers them late."""

    def __init__(self, upstream: Path, *, tls: ssl.SSLContext | None = None, seed: int = 0) -> None:
        self.latency_s = 0.0  # before each piece of data, either way
        self.reset_share = 0.0  # of replies that reset their connection instead
        self.resets = 0
        self._upstream = upstream
        self._tls = tls
        self._random = random.Random(seed)
        self._marker: bytes | None = None
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._gates: dict[Way, asyncio.Event] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    def hold(self, *ways: Way) -> None:
        """Let nothing through, and do not say so: a black hole in these directions."""
        self._do(*(self._gates[way].clear for way in ways))

    def heal(self) -> None:
        """Let everything through, what was held back first."""
        self._do(*(gate.set for gate in self._gates.values()))

    def cut(self) -> None:
        """Reset every connection."""
        self._do(*(link.reset for link in list(self._links)))

    def cut_answer(self, marker: bytes) -> None:
        """The next request with these bytes is delivered; its answer resets the connection."""
        self._do(lambda: setattr(self, "_marker", marker))

    @property
    def answer_was_cut(self) -> bool:
        return self._marker is None

    def _do(self, *changes: Callable[[], object]) -> None:
        """Run in the loop's thread, and wait for it."""

        async def run() -> None:
            for change in changes:
                change()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    async def _open(self) -> int:
        self._gates = {"requests": asyncio.Event(), "replies": asyncio.Event()}
        for gate in self._gates.values():
            gate.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        self._server.close()
        for link in list(self._links):
            link.reset()
        others = [t for t in asyncio.all_tasks(self._loop) if t is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
        except OSError:  # the server is away
            writer.transport.abort()
            return
        link = _Link(writer, up_writer)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._pump(reader, up_writer, "requests", link),
                self._pump(up_reader, writer, "replies", link),
            )
        finally:
            self._links.discard(link)
            link.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: Way,
        link: _Link,
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._gates[way].wait()
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                if way == "requests" and self._marker is not None and self._marker in data:
                    link.marked = True
                if way == "replies" and self._is_to_reset(link):
                    self.resets += 1
                    link.reset()
                    return
                writer.write(data)
                await writer.drain()
        except (OSError, ssl.SSLError):  # either end has gone
            link.reset()
        finally:
            writer.close()

    def _is_to_reset(self, link: _Link) -> bool:
        if link.marked:
            self._marker = None
            return True
        return self.reset_share > 0 and self._random.random() < self.reset_share


class _Link:
    """One connection through the proxy: its two ends."""

    def __init__(self, *ends: asyncio.StreamWriter) -> None:
        self._ends = ends
        self.marked = False

    def reset(self) -> None:
        """End it with RST, as a router does that has forgotten it."""
        for end in self._ends:
            if end.transport.is_closing():
                continue
            sock = end.get_extra_info("socket")
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()

    def close(self) -> None:
        for end in self._ends:
            end.close()
