"""The server process: an address, the application on it, and a worker beside it if wanted."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from dflash_batch.worker.errors import UserError
from dflash_batch.worker.gateway.app import Options, build
from dflash_batch.worker.gateway.attendant import Attendant
from dflash_batch.worker.gateway.guard import check_address
from dflash_batch.worker.home import private_dir
from dflash_batch.worker.locks import locked
from dflash_batch.worker.private import PrivateWorker
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.server import EmbeddedServer, check_server
from dflash_batch.worker.settings import WorkerSettings
from dflash_batch.worker.stopping import stoppable

GRACE_S = 5
"""Seconds that open calls have when the server is told to stop."""


class AddressTaken(UserError):
    """Raised when the server cannot listen where it is told to."""

    code = "address_unusable"


class ServerRuns(UserError):
    """Raised when another server of this home runs."""

    code = "server_runs"


@dataclass(frozen=True)
class Place:
    """Where the server listens, and where its queue is."""

    host: str
    port: int  # 0: any that is free
    redis: str | None  # None: the embedded server of the home


class _Front(uvicorn.Server):
    """A server that says when it answers, and heeds a stop that came before it could hear one."""

    def __init__(
        self, config: uvicorn.Config, stop: threading.Event, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._stop = stop
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.should_exit = self.should_exit or self._stop.is_set()
        if not self.should_exit:
            self._on_ready()


def serve(
    place: Place,
    options: Options,
    settings: WorkerSettings | None,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C or SIGTERM. `settings`, if given, are those of a worker of our own.

    `options.url`, `options.revive` and the URL of `settings` are filled in. Raises UserErrors.
    """
    check_address(place.host, options.tokens)
    with ExitStack() as stack:
        folder = private_dir(options.home / "gateway")
        if not stack.enter_context(locked(folder / "server")):
            raise ServerRuns(f"another server uses {options.home}; stop it or name another --home")
        listener = stack.enter_context(_listening(place))
        stop = stack.enter_context(stoppable())
        server = None
        if place.redis is None:
            server = stack.enter_context(EmbeddedServer(options.home))
            url, revive = server.url, server.ensure
        else:
            check_server(place.redis)
            url, revive = place.redis, options.revive
        options = replace(options, url=url, revive=revive)
        name, port = listener.getsockname()[:2]
        at = f"http://{f'[{name}]' if ':' in name else name}:{port}"
        front = _Front(
            uvicorn.Config(
                build(options),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=GRACE_S,
            ),
            stop,
            lambda: on_ready(at),
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        attendant = None
        if settings is not None:
            inherit = (server.users_fd,) if server else ()
            attendant = _attendant(stack, folder, replace(settings, redis_url=url), inherit, front)
        front.run(sockets=[listener])
        if attendant is not None and attendant.failure is not None:
            raise attendant.failure


def _attendant(
    stack: ExitStack,
    folder: Path,
    settings: WorkerSettings,
    inherit: tuple[int, ...],
    front: uvicorn.Server,
) -> Attendant:
    """A worker that runs until the stack unwinds; the server ends when it cannot be kept up."""
    client = connect(settings.redis_url)
    stack.callback(client.close)
    worker = PrivateWorker(
        queue=Queue(client),
        folder=folder,
        batch_id="serve",
        settings=settings,
        inherit=inherit,
        only=False,
    )

    def end() -> None:
        front.should_exit = True

    attendant = Attendant(worker, end)
    attendant.start()
    stack.callback(attendant.stop)
    return attendant


@contextmanager
def _listening(place: Place) -> Iterator[socket.socket]:
    """A socket bound to the address, so that calls wait from now on. Raises AddressTaken."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise AddressTaken(f"cannot use {place.host}: {error}") from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise AddressTaken(
                f"cannot listen on {place.host}:{place.port}: {error.strerror}"
            ) from error
        yield listener
