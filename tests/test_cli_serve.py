"""`dflash-batch serve` as a user starts it: with the bundled model's tokenizer and no worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cli_tools import invoke

from dflash_batch.cli import exits

COMMAND = (sys.executable, "-m", "dflash_batch.cli.main", "serve")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    options = ("-m", "demo", "--no-worker", "--port", "0", "--home", str(tmp_path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [*COMMAND, *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_stops_cleanly(
    process: subprocess.Popen[str], number: signal.Signals, tmp_path: Path
) -> None:
    assert process.stderr is not None
    said = process.stderr.readline()
    assert said.startswith("listening on http://127.0.0.1:")
    url = said.split()[2].removesuffix("/v1")
    if number == signal.SIGINT:
        info = httpx.get(f"{url}/tokenizer_info", timeout=60).json()
        assert info["chat_template"]
        text = httpx.post(f"{url}/tokenize", json={"prompt": "two words"}, timeout=60).json()
        assert text["count"] == len(text["tokens"]) > 1
        chat = {"messages": [{"role": "user", "content": "two words"}], "model": "demo"}
        found = httpx.post(f"{url}/tokenize", json=chat, timeout=60).json()
        assert found["count"] > text["count"]
        refused = httpx.post(f"{url}/tokenize", json={"prompt": ["a", "b"]}, timeout=60)
        assert refused.status_code == 400
    assert invoke("serve", "--port", 0, "--home", tmp_path).exit_code == exits.USAGE
    process.send_signal(number)
    assert process.wait(30) == exits.OK
    assert process.stderr.readlines()[-1] == "stopped; batches go on at the next start\n"
    assert not (tmp_path / "gateway" / "server").exists()
    assert not (tmp_path / "redis" / "valkey.sock").exists()


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    result = invoke("serve", "--host", "0.0.0.0", "--port", 0, "--home", tmp_path)
    assert result.exit_code == exits.USAGE
    assert "--token-file" in result.stderr
