"""Helpers of the command line's tests: run a command in this process, and make batch files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from dflash_batch.cli.main import main
from dflash_batch.worker.contract import CHAT


def invoke(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """The command's outcome, stdout and stderr apart."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def line(custom_id: str, text: str = "2+2?", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    full = {"messages": messages, "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": full}


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A JSONL file of these values; strings and bytes are written as they are."""
    parts = [
        item
        if isinstance(item, bytes)
        else item.encode()
        if isinstance(item, str)
        else encode(item)
        for item in lines
    ]
    path.write_bytes(b"".join(part + b"\n" for part in parts))
    return path


def encode(item: Any) -> bytes:
    return json.dumps(item).encode()
