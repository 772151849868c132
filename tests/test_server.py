"""The embedded server: shared by commands, stopped by the last, on the same data whatever dies."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from queue_tools import LocalServer, until

from dflash_batch.worker.binary import ServerStartError, find_binary
from dflash_batch.worker.home import home_dir
from dflash_batch.worker.queue import QueueUnreachable, connect
from dflash_batch.worker.server import (
    EmbeddedServer,
    ServerUnfit,
    check_server,
    open_server,
    redis_url,
)

USER = """
import sys
from pathlib import Path
from dflash_batch.worker.server import EmbeddedServer
with EmbeddedServer(Path(sys.argv[1])) as server:
    print(server.pid(), flush=True)
    sys.stdin.readline()
"""


class User:
    """A command that uses the server until it is told to leave, in a process of its own."""

    def __init__(self, home: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", USER, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def server_pid(self) -> int:
        """Waits until it has the server."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def leave(self) -> None:
        self._process.communicate("\n", timeout=20)
        assert self._process.returncode == 0

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def user(home: Path) -> Iterator[Callable[[], User]]:
    """Starts users; none of them outlives the test."""
    users: list[User] = []

    def start() -> User:
        users.append(User(home))
        return users[-1]

    yield start
    for one in users:
        one.kill()


@pytest.fixture(autouse=True)
def _no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_BATCH_REDIS", raising=False)
    monkeypatch.delenv("DFLASH_BATCH_VALKEY", raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home; no server of it is left running."""
    path = home_dir(str(tmp_path / "h"))
    yield path
    pid = EmbeddedServer(path).pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    assert pid is None, "a server was left running"


def client(server: EmbeddedServer) -> redis.Redis:
    return connect(server.url)


def count(server: EmbeddedServer) -> int:
    """Adds one to a number in the server."""
    with client(server) as connection:
        return int(connection.incr("n"))


def running(home: Path) -> int | None:
    return EmbeddedServer(home).pid()


def test_it_is_set_up_to_keep_a_queue_and_for_us_alone(home: Path) -> None:
    with EmbeddedServer(home) as server, client(server) as connection:
        settings = connection.config_get("*")
        assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "everysec")
        assert (settings["maxmemory-policy"], settings["save"]) == ("noeviction", "")
        assert settings["port"] == "0"
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        pid = server.pid()
        assert pid is not None
        assert os.getsid(pid) == pid
    assert running(home) is None


def test_what_was_written_is_there_after_a_stop(home: Path) -> None:
    for expected in (1, 2, 3):
        with open_server(home) as server:
            assert count(server) == expected


def test_commands_that_start_at_once_share_one_server_and_the_last_stops_it(
    home: Path, user: Callable[[], User]
) -> None:
    users = [user() for _ in range(3)]
    pids = {user.server_pid() for user in users}
    assert len(pids) == 1
    users[0].leave()
    users[1].leave()
    assert running(home) in pids
    users[2].leave()
    assert running(home) is None


def test_a_killed_user_does_not_keep_the_server_from_being_stopped(
    home: Path, user: Callable[[], User]
) -> None:
    first, second = user(), user()
    assert first.server_pid() == second.server_pid()
    first.kill()
    assert running(home) is not None
    second.leave()
    assert running(home) is None


def test_a_server_whose_users_were_all_killed_is_found_again(
    home: Path, user: Callable[[], User]
) -> None:
    killed = user()
    pid = killed.server_pid()
    killed.kill()
    assert running(home) == pid
    with EmbeddedServer(home) as server:
        assert server.pid() == pid
    assert running(home) is None


def test_a_killed_server_is_started_again_on_the_same_data(home: Path) -> None:
    with EmbeddedServer(home) as server:
        for expected in range(1, 51):
            assert count(server) == expected
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.pid() is None, "the server is gone")
        server.ensure()
        assert count(server) == 51
        os.kill(server.pid() or 0, signal.SIGKILL)
        until(lambda: server.pid() is None, "the server is gone")
    with EmbeddedServer(home) as server:
        assert count(server) == 52


def test_a_child_that_got_the_descriptor_counts_as_a_user(home: Path) -> None:
    with EmbeddedServer(home) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(server.users_fd,)
        )
        pid = server.pid()
    assert running(home) == pid
    child.communicate(b"\n")
    with EmbeddedServer(home) as server:
        assert server.pid() == pid
    assert running(home) is None


def test_a_stale_pid_and_a_stale_socket_are_no_server(home: Path) -> None:
    with EmbeddedServer(home) as server:
        count(server)
        socket = server.socket
    (home / "redis" / "valkey.pid").write_text(str(os.getpid()))
    socket.touch()
    with EmbeddedServer(home) as server:
        assert server.pid() != os.getpid()
        assert count(server) == 2


def test_a_server_whose_socket_was_swept_away_is_replaced(
    home: Path, user: Callable[[], User], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_batch.worker.server.JOIN_S", 0.2)
    other = user()
    before = other.server_pid()
    (home / "redis" / "valkey.sock").unlink()
    with EmbeddedServer(home) as server:
        assert server.pid() != before
        assert count(server) == 1
    other.leave()


def test_a_long_home_gets_a_short_socket_and_remembers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = home_dir(str(tmp_path / ("long name " * 12) / "h"))
    with EmbeddedServer(home) as server:
        assert len(os.fsencode(server.socket)) < 100
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
        assert count(server) == 1
        other = EmbeddedServer(home)
        with other:
            assert other.socket == server.socket
    first = server.socket.parent
    first.rmdir()
    with EmbeddedServer(home) as server:
        assert count(server) == 2
        second = server.socket.parent
    second.rmdir()


def test_a_home_with_blanks_and_signs_works(tmp_path: Path) -> None:
    home = home_dir(str(tmp_path / "Application Support & ü %20"))
    with EmbeddedServer(home) as server:
        assert count(server) == 1


def test_a_damaged_file_is_named_and_nothing_is_thrown_away(home: Path) -> None:
    with EmbeddedServer(home) as server:
        for _ in range(100):
            count(server)
    files = sorted((home / "redis" / "appendonlydir").glob("*.incr.aof"))
    damaged = bytearray(files[0].read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 40] = b"x" * 40
    files[0].write_bytes(damaged)

    with pytest.raises(ServerStartError, match="file is damaged") as caught:
        EmbeddedServer(home).__enter__()
    assert "appendonlydir" in str(caught.value)
    assert files[0].read_bytes() == damaged
    assert running(home) is None

    (home / "redis" / "appendonlydir").rename(home / "redis" / "damaged")
    with EmbeddedServer(home) as server:
        assert count(server) == 1


def test_a_server_that_does_not_run_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_BATCH_VALKEY", "/bin/false")
    with pytest.raises(ServerStartError, match="did not start"):
        EmbeddedServer(home).__enter__()
    monkeypatch.setenv("DFLASH_BATCH_VALKEY", str(home / "absent"))
    with pytest.raises(ServerStartError, match="not a program"):
        EmbeddedServer(home).__enter__()


def test_the_binary_comes_from_path_when_the_wheel_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = find_binary()
    monkeypatch.setattr("dflash_batch.worker.binary._bundled", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match="--redis or DFLASH_BATCH_REDIS"):
        find_binary()
    old = tmp_path / "valkey-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=0:0'\n")
    old.chmod(0o755)
    (tmp_path / "redis-server").symlink_to(bundled)
    assert find_binary() == tmp_path / "redis-server"


def test_flag_before_environment_before_embedded(
    home: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_url(valkey_url, home) as url:
        assert url == valkey_url
    monkeypatch.setenv("DFLASH_BATCH_REDIS", valkey_url)
    with redis_url(None, home) as url:
        assert url == valkey_url
    assert not (home / "redis").exists()
    monkeypatch.setenv("DFLASH_BATCH_REDIS", "")
    with redis_url(None, home) as url:
        assert url == f"unix://{home}/redis/valkey.sock"
    assert running(home) is None


def test_a_server_that_would_drop_rows_or_is_too_old_is_refused(
    valkey_server: LocalServer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_server(valkey_server.url)
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        check_server(valkey_server.url)
        redis_client.config_set("maxmemory", "100mb")
        with pytest.raises(ServerUnfit, match="noeviction"):
            check_server(valkey_server.url)
    finally:
        redis_client.config_set("maxmemory", "0")
        redis_client.config_set("maxmemory-policy", "noeviction")
    monkeypatch.setattr("dflash_batch.worker.server.OLDEST", (99, 0))
    with pytest.raises(ServerUnfit, match="newer is needed"):
        check_server(valkey_server.url)


def test_a_server_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(QueueUnreachable, match="--redis"):
        check_server(f"unix://{tmp_path}/nothing")
