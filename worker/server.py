"""The embedded queue server: one Valkey for all commands of a home, stopped by the last of them.

Three lock files settle who does what, and the kernel drops each when its holder dies, however it
dies. `server.lock` (exclusive) is held while somebody starts or stops the server; `users.lock`
(shared) by every user while it uses the server; `alive.lock` (exclusive) by the server itself, so
that "is it running" never rests on a process number.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dflash_batch.worker.address import check_address
from dflash_batch.worker.binary import (
    ENV_REDIS,
    OLDEST,
    ServerStartError,
    find_binary,
    version_of,
)
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.home import private_dir
from dflash_batch.worker.queue import connect

SOCKET_BYTES = 100
"""Longest socket path we use; macOS allows 103 bytes, Linux 107."""

START_S = 30.0
"""How long a server may take to answer at all. Loading its file after that has no limit."""

JOIN_S = 5.0
"""How long a server that runs may take to answer before it is replaced."""

STOP_S = 30.0
"""How long a server may take to write its file and go."""

LOG_BYTES = 1 << 20
"""A server log larger than this is set aside at the next start."""


class ServerUnfit(UserError):
    """Raised when a given Redis is too old, or would drop queued rows when memory is short."""

    code = "queue_unfit"


@contextmanager
def redis_url(option: str | None, home: Path, *, insecure: bool = False) -> Iterator[str]:
    """The URL of the queue for as long as the block lasts.

    `option` (--redis) comes before DFLASH_BATCH_REDIS, and both before the embedded server of
    `home`, which runs at least until the block ends. `insecure` allows an address over which others
    can read along. Raises QueueExposed, QueueUnreachable, ServerUnfit or ServerStartError.
    """
    url = given_url(option)
    if url is not None:
        check_server(url, insecure=insecure)
        yield url
        return
    with EmbeddedServer(home) as server:
        yield server.url


def open_server(home: Path) -> EmbeddedServer:
    """The embedded server of `home`, to be used as a context manager with a `url`."""
    return EmbeddedServer(home)


def given_url(option: str | None) -> str | None:
    """The URL the user named, by flag or environment; None asks for the embedded server."""
    return option or os.environ.get(ENV_REDIS) or None


def check_server(url: str, *, insecure: bool = False) -> None:
    """Make sure that the server at `url` may be spoken to, answers and can keep a queue.

    Raises QueueExposed, QueueUnreachable or ServerUnfit.
    """
    check_address(url, insecure=insecure)
    client = connect(url)
    try:
        facts = client.info("server") | client.info("memory")
    except redis.RedisError as error:
        raise ServerUnfit(f"the Redis given does not answer INFO: {error}") from error
    finally:
        client.close()
    version = str(facts.get("redis_version", "0"))
    if version_of(version) < OLDEST:
        raise ServerUnfit(f"the Redis given is version {version}; 6.2 or newer is needed")
    policy = facts.get("maxmemory_policy", "noeviction")
    if int(facts.get("maxmemory", 0)) > 0 and policy != "noeviction":
        raise ServerUnfit(
            f"the Redis given drops keys when its memory is full (maxmemory-policy {policy}), "
            "which would lose queued rows. Set it to noeviction: "
            "CONFIG SET maxmemory-policy noeviction"
        )


class EmbeddedServer:
    """A use of the embedded server of a home. `with` starts it or joins the one that runs.

    `url` is valid inside the block. `users_fd` may be handed to a child process (`pass_fds`),
    which then counts as a user until it ends.
    """

    def __init__(self, home: Path) -> None:
        self.folder = private_dir(home / "redis")
        self.log = self.folder / "valkey.log"
        self._users: int | None = None
        self._socket: Path | None = None

    @property
    def url(self) -> str:
        """`unix://` with the socket's path, quoted as redis-py expects."""
        return f"unix://{quote(str(self.socket))}"

    @property
    def socket(self) -> Path:
        assert self._socket is not None, "the server is used outside its block"
        return self._socket

    @property
    def users_fd(self) -> int:
        assert self._users is not None, "the server is used outside its block"
        return self._users

    def __enter__(self) -> Self:
        with self._turn():
            users = os.open(self.folder / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # At once: whoever holds it exclusively also holds `server.lock`, which is ours.
                fcntl.flock(users, fcntl.LOCK_SH)
                self._start_or_join()
            except BaseException:
                os.close(users)
                raise
            self._users = users
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._turn():
            os.close(self.users_fd)
            self._users = None
            if self._is_unused():
                self._stop()

    def ensure(self) -> None:
        """Start the server again if it died under us, on the same file.

        The URL stays the same unless the folder of the socket was removed. Raises
        ServerStartError.
        """
        with self._turn():
            self._start_or_join()

    def pid(self) -> int | None:
        """The process number of the running server, None if none runs."""
        if not self._is_alive():
            return None
        try:
            return int((self.folder / "valkey.pid").read_text())
        except (OSError, ValueError):
            return None

    # Everything below runs with `server.lock` held.

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold `server.lock`: one starter or stopper at a time."""
        with (self.folder / "server.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _is_unused(self) -> bool:
        """Whether nobody holds the users' lock. Asked on a descriptor of its own, since one shared
        with a child would let us take a lock that the child still counts on."""
        return _is_free(self.folder / "users.lock", fcntl.LOCK_EX)

    def _is_alive(self) -> bool:
        return not _is_free(self.folder / "alive.lock", fcntl.LOCK_SH)

    def _start_or_join(self) -> None:
        self._socket = self._socket_path()
        if self._is_alive():
            if self._wait_for_answer(None):
                return
            # It lives but cannot be reached: its socket was swept away, or it hangs.
            self._stop()
        self._start()

    def _socket_path(self) -> Path:
        """In the folder if the path is short enough, else in a folder we remember."""
        usual = self.folder / "valkey.sock"
        if len(os.fsencode(usual)) < SOCKET_BYTES:
            return usual
        note = self.folder / "socket-folder"
        if note.exists() and _is_ours(remembered := Path(note.read_text())):
            return remembered / usual.name
        folder = Path(tempfile.mkdtemp(prefix="dflash-batch-"))
        if len(os.fsencode(folder / usual.name)) >= SOCKET_BYTES:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="dflash-batch-", dir="/tmp"))
        note.write_text(str(folder))
        return folder / usual.name

    def _start(self) -> None:
        binary = find_binary()
        self.socket.unlink(missing_ok=True)
        (self.folder / "valkey.pid").unlink(missing_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        begin = self.log.stat().st_size if self.log.exists() else 0
        alive = os.open(self.folder / "alive.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(alive, fcntl.LOCK_EX)
            with self.log.open("ab") as log:
                process = _spawn(self._command(binary), self.folder, alive, log)
        except OSError as error:
            raise ServerStartError(f"cannot run the queue server {binary}: {error}") from error
        finally:
            os.close(alive)
        if not self._wait_for_answer(process):
            _end(process)
            raise ServerStartError(self._why(begin))

    def _command(self, binary: Path) -> list[str]:
        # Names are relative to the folder it runs in: old servers split options at spaces.
        inside = self.socket.parent == self.folder
        options = {
            "port": "0",
            "unixsocket": self.socket.name if inside else str(self.socket),
            "unixsocketperm": "700",
            "dir": "./",
            "pidfile": "valkey.pid",
            "logfile": self.log.name,
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        return [str(binary), *(part for k, v in options.items() for part in (f"--{k}", v))]

    def _wait_for_answer(self, process: subprocess.Popen[bytes] | None) -> bool:
        """Whether the server answers PING; waits while it loads its file, however long."""
        retry = Retry(NoBackoff(), 0)
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2, retry=retry)
        deadline = time.monotonic() + (START_S if process else JOIN_S)
        try:
            while True:
                try:
                    return bool(client.ping())
                except redis.BusyLoadingError:
                    deadline = time.monotonic() + START_S
                except (redis.ConnectionError, redis.TimeoutError):
                    if time.monotonic() > deadline:
                        return False
                gone = process.poll() is not None if process else not self._is_alive()
                if gone:
                    return False
                time.sleep(0.01)
        finally:
            client.close()

    def _stop(self) -> None:
        """SIGTERM, which makes the server write its file to disk, and wait until it is gone."""
        deadline = time.monotonic() + STOP_S
        while self._is_alive():
            pid = self.pid()
            if pid is not None:
                with suppress(ProcessLookupError):
                    late = time.monotonic() > deadline
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            if time.monotonic() > deadline + STOP_S:
                raise ServerStartError(
                    f"the queue server in {self.folder} (process {pid}) does not stop. "
                    "End that process and run the command again."
                )
            _wait_until(lambda: not self._is_alive(), 1.0)
        for process in [child for child in _children if child.poll() is not None]:
            _children.remove(process)

    def _why(self, begin: int) -> str:
        """What the log says since `begin`, and what to do about it."""
        with self.log.open("rb") as log:
            log.seek(begin)
            lines = log.read().decode(errors="replace").splitlines()
        text = "\n".join(lines[-8:])
        if _DAMAGED.search(text):
            cure = (
                f"Its file is damaged. Results already in output files are safe: move "
                f"{self.folder / 'appendonlydir'} away and run the command again; "
                "`run` then queues only the rows that are missing."
            )
        else:
            cure = f"The whole log is {self.log}."
        return f"the queue server did not start. {cure} It said:\n{text}"


_DAMAGED = re.compile(r"bad file format|unrecoverable error|unexpected end of file|corrupt", re.I)
"""What a server says that cannot read the file it kept its keys in."""

_children: list[subprocess.Popen[bytes]] = []
"""Servers we started: they outlive us, but a handle dropped while it runs would complain."""


def _spawn(command: list[str], folder: Path, alive: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """The server, in a session of its own, so that Ctrl-C does not reach it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(alive,),
        start_new_session=True,
    )
    _children.append(process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server that never answered, and take its status."""
    process.kill()
    process.wait()
    _children.remove(process)


def _is_free(path: Path, how: int) -> bool:
    """Whether a lock of kind `how` (LOCK_SH or LOCK_EX) could be had on `path` now."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_ours(folder: Path) -> bool:
    """Whether a remembered folder is still there, and nobody else's."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and not folder.is_symlink() and found.st_uid == os.geteuid()
