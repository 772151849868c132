"""The files in deploy/ do what they say."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from queue_tools import until

from dflash_batch.cli.main import main
from dflash_batch.worker.binary import find_binary
from dflash_batch.worker.launchd import GRACE_S
from dflash_batch.worker.queue import connect
from dflash_batch.worker.server import check_server

ROOT = Path(__file__).resolve().parent.parent


def test_the_server_configuration_gives_a_queue_that_loses_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="dfb-") as folder:
        socket = Path(folder) / "s"
        place = ["--port", "0", "--unixsocket", str(socket), "--dir", folder, "--logfile", "log"]
        server = subprocess.Popen([find_binary(), str(ROOT / "deploy" / "valkey.conf"), *place])
        try:
            until(socket.exists, "the server's socket")
            url = f"unix://{socket}"
            check_server(url)
            settings: dict[Any, Any] = connect(url).config_get("append*")
            settings |= connect(url).config_get("maxmemory-policy")
        finally:
            server.terminate()
            server.wait(timeout=20)
    told = {_text(key): _text(value) for key, value in settings.items()}
    assert told["appendonly"] == "yes"
    assert told["maxmemory-policy"] == "noeviction"


def test_the_container_is_on_loopback_and_has_a_password() -> None:
    service = _compose()
    (port,) = service["ports"]
    assert port.startswith("${DFLASH_BATCH_BIND:-127.0.0.1}:")
    assert service["environment"]["PASSWORD"].startswith("${DFLASH_BATCH_PASSWORD:?")
    assert "./valkey.conf:/etc/valkey/valkey.conf:ro" in service["volumes"]


def test_the_containers_command_starts_a_server_that_asks_for_the_password() -> None:
    with tempfile.TemporaryDirectory(prefix="dfb-") as folder:
        socket = Path(folder) / "s"
        *shell, script = _compose()["command"]
        for inside, here in (
            ("$$", "$"),
            ("exec valkey-server", f"exec {find_binary()}"),
            ("/etc/valkey/valkey.conf", str(ROOT / "deploy" / "valkey.conf")),
            ("--port 6379", f"--port 0 --unixsocket {socket} --logfile log"),
            ("/data", folder),
        ):
            assert inside in script
            script = script.replace(inside, here)
        password = "a #'word"
        server = subprocess.Popen([*shell, script], env=os.environ | {"PASSWORD": password})
        try:
            until(socket.exists, "the server's socket")
            stranger = redis.Redis(unix_socket_path=str(socket))
            with stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            with redis.Redis(unix_socket_path=str(socket), password=password) as client:
                settings: dict[Any, Any] = client.config_get("appendonly")
                assert [_text(value) for value in settings.values()] == ["yes"]
            said = Path(f"/proc/{server.pid}/cmdline")
            assert not said.exists() or b"word" not in said.read_bytes()
        finally:
            server.terminate()  # as a container is stopped: it must reach the server itself
            assert server.wait(timeout=20) == 0


def test_the_service_of_linux_runs_a_worker_and_lets_it_drain() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / "dflash-batch-worker.service")
    service = unit["Service"]
    program, verb, *options = shlex.split(service["ExecStart"])
    assert Path(program).name == "dflash-batch"
    with main.make_context("dflash-batch", [verb]) as ctx:
        command = main.get_command(ctx, verb)
        assert command is not None
        command.make_context(verb, options, parent=ctx)
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) == GRACE_S
    assert service["Restart"] == "on-failure"


def _compose() -> dict[str, Any]:
    text = (ROOT / "deploy" / "compose.yaml").read_text("utf-8")
    service: dict[str, Any] = yaml.safe_load(text)["services"]["queue"]
    return service


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
