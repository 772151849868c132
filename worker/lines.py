"""Output and error lines: how a finished row, or a line that never became one, is written down.

The shapes are those of the OpenAI batch format: a failure that has a status is an HTTP-like
response with `body.error`; only a row that never ran has the outer `error`.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from dflash_batch.worker.contract import RowResult
from dflash_batch.worker.reader import LineError


def output_line(result: RowResult, batch_id: str) -> str:
    """One finished row as JSON text, LF included, for the output or the error file."""
    line: dict[str, Any] = {
        "id": f"batch_req_{row_hash(batch_id, result.index)}",
        "custom_id": result.custom_id,
        "response": result.response,
        "error": result.error,
    }
    if result.metadata is not None:
        line["metadata"] = result.metadata
    return encode(line)


def is_error(result: RowResult) -> bool:
    """Whether the row's line belongs into the error file."""
    return not result.ok


def rejected_line(error: LineError, batch_id: str) -> str:
    """A line that was refused before it ran, as JSON text, LF included, for the error file."""
    name = row_hash(batch_id, f"line {error.line}")
    body = {
        "message": error.message,
        "type": "invalid_request_error",
        "param": error.param,
        "code": error.code.value,
    }
    return encode(
        {
            "id": f"batch_req_{name}",
            "custom_id": error.custom_id,
            "response": {
                "status_code": 400,
                "request_id": f"req_{name}",
                "body": {"error": body},
            },
            "error": None,
            "line": error.line,
        }
    )


def row_hash(batch_id: str, row: int | str) -> str:
    """24 hex digits that name a row for good: the same row has the same ids after any restart."""
    return hashlib.sha256(f"{batch_id}/{row}".encode()).hexdigest()[:24]


_UNSAFE = re.compile("[\u0085\u2028\u2029\ud800-\udfff]")


def encode(line: dict[str, Any]) -> str:
    """Compact JSON with its LF. Text is raw UTF-8, save for what readers take for a line's end."""
    text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n"
