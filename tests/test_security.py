"""Who can read along, who can do what, and what is written down."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from chaos_tools import Scene
from cli_tools import invoke, line, write_lines
from proxy import Proxy
from queue_tools import (
    WorkerProcess,
    all_results,
    assert_settled,
    is_done,
    row,
    submit,
    until,
)

from dflash_batch.worker import checkup
from dflash_batch.worker.address import QueueExposed, check_address
from dflash_batch.worker.binary import find_binary
from dflash_batch.worker.queue import Queue, QueueUnreachable, connect
from dflash_batch.worker.server import check_server

ROOT = Path(__file__).resolve().parent.parent
MARKER = "xyzzy-secret-prompt"


# --- addresses ----------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and where they lead, instead of the network's own."""
    known: dict[str, list[str]] = {}

    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("100.64.0.1", False),
        ("100.127.255.254", False),
        ("fd7a:115c:a1e0::17", False),
        ("100.128.0.1", True),
        ("192.168.1.7", True),
        ("10.0.0.7", True),
        ("169.254.3.4", True),
        ("fe80::1%en0", True),
        ("fd00::1", True),
        ("93.184.216.34", True),
    ],
)
def test_plain_redis_is_refused_where_others_can_read_along(
    names: dict[str, list[str]], address: str, refused: bool
) -> None:
    names["studio.local"] = [address]
    url = "redis://:pass@studio.local:6379/0"
    if not refused:
        check_address(url)
        return
    with pytest.raises(QueueExposed, match="--insecure") as caught:
        check_address(url)
    assert "pass@" not in str(caught.value)
    check_address(url, insecure=True)
    check_address(url.replace("redis://", "rediss://"))


def test_one_exposed_address_of_a_name_is_enough(names: dict[str, list[str]]) -> None:
    names["studio"] = ["100.64.0.1", "192.168.1.7"]
    with pytest.raises(QueueExposed, match=r"192\.168\.1\.7"):
        check_address("redis://studio")
    check_address("redis://nowhere")  # who connects says so
    check_address("unix:///tmp/s")


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_check_hostname=False"])
def test_tls_that_believes_anybody_is_refused(option: str) -> None:
    with pytest.raises(QueueExposed, match=option.partition("=")[0]):
        check_address(f"rediss://studio?{option}")
    check_address(f"rediss://studio?{option}", insecure=True)


def test_every_verb_refuses_and_says_how_to_go_on(
    names: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names["studio.local"] = ["192.168.1.7"]
    source = write_lines(tmp_path / "in.jsonl", [line("a")])
    there = ("--home", tmp_path / "home", "--redis", "redis://studio.local:1")
    for words in (
        ("run", source, "-m", "demo"),
        ("submit", source, "-m", "demo"),
        ("worker", "-m", "demo"),
        ("status",),
        ("results", "@last"),
    ):
        result = invoke(*there, *words)
        assert result.exit_code == 2, words
        assert "in the clear" in result.stderr
        assert "--insecure" in result.stderr
        assert "no queue at" in invoke(*there, "--insecure", *words).stderr
    monkeypatch.setenv("DFLASH_BATCH_INSECURE", "1")
    assert "no queue at" in invoke(*there, "status").stderr
    [finding] = checkup.queue(checkup.Subject(tmp_path, str(there[-1])))
    assert (finding.level, "in the clear" in finding.text) == ("failed", True)


# --- TLS ----------------------------------------------------------------------------------------


class Certificates:
    """An authority of our own, and a certificate of it for `localhost`."""

    def __init__(self, folder: Path) -> None:
        self.ca, self._key, self._cert = (folder / name for name in ("ca.pem", "key", "cert"))
        days = ("-days", "2", "-nodes", "-newkey", "rsa:2048", "-keyout")
        root = ("req", "-x509", "-subj", "/CN=test authority", "-out", str(self.ca))
        self._openssl(*root, *days, str(folder / "ca.key"))
        request = folder / "request"
        self._openssl("req", "-subj", "/CN=x", "-out", str(request), *days[2:], str(self._key))
        names = folder / "names"
        names.write_text("subjectAltName=DNS:localhost\n")
        self._openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.ca)),
            *("-CAkey", str(folder / "ca.key"), "-CAcreateserial", "-days", "2"),
            *("-extfile", str(names), "-out", str(self._cert)),
        )

    def server_side(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._cert, self._key)
        return context

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_tls_asks_for_a_certificate_of_the_named_authority_and_for_the_right_name(
    scene: Scene, tmp_path: Path
) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "other").mkdir()
    ours, other = Certificates(tmp_path / "ours"), Certificates(tmp_path / "other")
    proxy: Proxy = scene.proxy(tls=ours.server_side())
    url = f"rediss://localhost:{proxy.port}"
    rows = scene.submit(8)
    scene.worker(url=f"{url}?ssl_ca_certs={ours.ca}", lease_ttl_s=5.0)
    scene.done()
    check_server(f"{url}?ssl_ca_certs={ours.ca}")
    for wrong in (
        url,  # an authority that no system knows
        f"{url}?ssl_ca_certs={other.ca}",
        f"rediss://127.0.0.1:{proxy.port}?ssl_ca_certs={ours.ca}",  # not the name it is for
    ):
        with pytest.raises(QueueUnreachable, match="certificate verify failed"):
            connect(wrong, retries=0)
    scene.check(rows)


# --- users --------------------------------------------------------------------------------------


@pytest.fixture
def guarded() -> Iterator[dict[str, str]]:
    """A server with the users of deploy/users.acl: name -> URL."""
    with tempfile.TemporaryDirectory(prefix="dfb-") as place, ExitStack() as stack:
        folder = Path(place)
        shutil.copy(ROOT / "deploy" / "users.acl", folder / "users.acl")
        process = subprocess.Popen(
            [
                *(find_binary(), ROOT / "deploy" / "valkey.conf", "--port", "0", "--dir", folder),
                *("--unixsocket", folder / "s", "--aclfile", folder / "users.acl"),
            ],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        until((folder / "s").exists, "the server's socket")
        users = ("operator", "submitter", "worker")
        yield {u: f"unix://{u}:CHANGE-ME-{u}@{folder}/s" for u in users} | {
            "nobody": f"unix://{folder}/s"
        }


def test_all_that_submitters_and_workers_do_is_allowed_to_them(
    guarded: dict[str, str], tmp_path: Path
) -> None:
    operator = connect(guarded["operator"])
    operator.acl_log_reset()
    queue = Queue(connect(guarded["submitter"]))
    submit(queue, [row(i, "poison" if i == 3 else None) for i in range(24)], shard_rows=8)
    workers = [
        WorkerProcess(guarded["worker"], *engine, log=tmp_path / f"log{n}", lease_ttl_s=1.0)
        for n, engine in enumerate([("--step-s", "0.05"), ("--crash", "poison")])
    ]
    try:
        until(lambda: len(all_results(queue)) > 2, "rows are recorded")
        workers[0].kill()
        until(lambda: is_done(queue), "the batch is done", 60)
        assert_settled(queue)
        submit(queue, [row(i) for i in range(8)], batch_id="batch_b")
        queue.cancel("batch_b")
        assert queue.workers()
        workers[1].signal(signal.SIGTERM)
        assert workers[1].wait() == 0
    finally:
        for worker in workers:
            worker.kill()
    source = write_lines(tmp_path / "in.jsonl", [line(f"l-{n}") for n in range(3)])
    there = ("--home", tmp_path / "home", "--redis", guarded["submitter"])
    for words in (
        ("submit", source, "-m", "demo"),
        ("status",),
        ("status", "@last"),
        ("results", "batch_a", "-o", tmp_path / "out.jsonl"),
    ):
        assert invoke(*there, *words).exit_code in (0, 1), words
    last = queue.results("batch_a", "0-0", count=100)[-1][0]
    queue.acknowledge("batch_a", last)
    queue.forget("batch_a")
    denied = {(entry["username"], entry["object"]) for entry in operator.acl_log()}
    assert denied == set()


def test_users_can_do_no_harm_to_the_server(guarded: dict[str, str]) -> None:
    with pytest.raises(QueueUnreachable):
        connect(guarded["nobody"], retries=0)
    harm: list[tuple[object, ...]] = [
        ("FLUSHALL",),
        ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
        ("KEYS", "*"),
        ("CLIENT", "LIST"),
        ("MONITOR",),
        ("SCRIPT", "FLUSH"),
        ("SET", "other", "1"),
        ("GET", "other"),
        ("EVAL", "return redis.call('SET', 'other', '1')", 0),
        ("PUBLISH", "other", "1"),
    ]
    for user in ("submitter", "worker"):
        client = connect(guarded[user])
        for words in harm:
            with pytest.raises(redis.ResponseError, match=r"ermission|ACL"):
                client.execute_command(*words)
    assert connect(guarded["operator"]).dbsize() == 0


# --- what is written down -----------------------------------------------------------------------


def test_no_prompt_is_in_a_log_and_nothing_is_open_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from client_tools import Remember, options

    from dflash_batch.worker.client import run_batch

    rows = [row(n, f"{MARKER} {n}{' poison' if n == 2 else ''}") for n in range(8)]
    rows[5] = row(5, f"{MARKER} explode")
    seen: list[str] = []

    def look() -> None:
        listing = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True)
        seen.append(listing.stdout)
        for log in (tmp_path / "home" / "runs").iterdir():
            seen.append(log.read_text(errors="replace"))
        for path in (tmp_path / "home").rglob("*"):
            info = path.lstat()
            if stat.S_ISSOCK(info.st_mode) or path.is_dir():
                assert stat.S_IMODE(info.st_mode) & 0o077 == 0 or _behind_a_wall(path), path

    chosen = options(tmp_path, "--crash", "poison", "--step-s", "0.1", lease_ttl_s=2.0)
    watch = Remember(3, look)
    totals = run_batch(rows, [], chosen, watch)
    assert (totals.ok, totals.failed) == (6, 2)
    assert any("worker_started" in text for text in seen), "the worker's log was looked at"
    written = [*seen, *capfd.readouterr(), *watch.notes]
    for path in (tmp_path / "home").rglob("*"):
        if path.is_file() and "appendonlydir" not in path.parts:  # the queue itself, on disk
            written.append(path.read_bytes().decode(errors="replace"))
    assert not [text for text in written if MARKER in text]
    assert MARKER not in (tmp_path / "in.errors.jsonl").read_text()


def _behind_a_wall(path: Path) -> bool:
    """Whether a folder on the way to it is closed to others."""
    return any(stat.S_IMODE(p.stat().st_mode) & 0o077 == 0 for p in path.parents if p.exists())
