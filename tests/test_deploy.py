"""The files in deploy/ do what they say."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from queue_tools import until

from dflash_batch.worker.binary import find_binary
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


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
