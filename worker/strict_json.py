"""JSON of one input line, read strictly: nothing passes that other parsers would refuse.

Refused are duplicate keys, NaN and Infinity, numbers beyond a double, halves of surrogate pairs and
bytes that are not UTF-8; each with its column where that is known.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from dflash_batch.worker.contract import ErrorCode


class BadLine(Exception):
    """Raised when a line cannot be run; the reader makes a LineError of it."""

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, column: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.column = column


def parse_object(data: bytes) -> dict[str, Any]:
    """The line's object. Raises BadLine."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        column = len(data[: error.start].decode()) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8 (col {column})"
        raise BadLine(ErrorCode.INVALID_ENCODING, message, column=column) from error
    try:
        value, end = _decoder.raw_decode(text) if text.startswith("{") else (None, -1)
        if end != len(text):
            value = _decoder.decode(text)  # spaces around it, or trouble: the slower way
    except json.JSONDecodeError as error:
        raise _json_problem(error, text) from error
    except BadLine as problem:
        raise _located(problem, text) from problem
    except RecursionError as error:
        raise BadLine(ErrorCode.INVALID_JSON_LINE, "nested too deeply") from error
    except ValueError as error:  # what Python's int() refuses to read
        message = "holds an integer of thousands of digits"
        raise BadLine(ErrorCode.INVALID_JSON_LINE, message) from error
    if b"\\ud" in data or b"\\uD" in data:
        _refuse_lone_surrogates(text)
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}
        message = f"must be an object, not {kind.get(type(value), 'a number')}"
        raise BadLine(ErrorCode.INVALID_JSON_LINE, message)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        message = f"key {quoted(twice)} appears twice in one object"
        raise BadLine(ErrorCode.INVALID_JSON_LINE, message)
    return found


def _constant(name: str) -> float:
    raise BadLine(ErrorCode.INVALID_JSON_LINE, f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        message = f"number {text[:40]} is too large"
        raise BadLine(ErrorCode.INVALID_JSON_LINE, message)
    return value


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)

_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|(NaN|-?Infinity)')


def _located(problem: BadLine, text: str) -> BadLine:
    """The same problem with its column, where a second look can find it."""
    if not problem.message.endswith("is not JSON"):
        return problem
    for match in _CONSTANT.finditer(text):
        if match.group(1):
            column = match.start() + 1
            message = f"{problem.message} (col {column})"
            return BadLine(problem.code, message, column=column)
    return problem


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")


def _refuse_lone_surrogates(text: str) -> None:
    r"""Raises BadLine for a \ud83d without its other half: it is no character."""
    high_ends_at = -1
    for match in _ESCAPE.finditer(text):
        code = int(match.group(1), 16) if match.group(1) else 0
        if high_ends_at >= 0:
            if 0xDC00 <= code <= 0xDFFF and match.start() == high_ends_at:
                high_ends_at = -1
                continue
            raise _lone(high_ends_at - 6)
        if 0xDC00 <= code <= 0xDFFF:
            raise _lone(match.start())
        if 0xD800 <= code <= 0xDBFF:
            high_ends_at = match.end()
    if high_ends_at >= 0:
        raise _lone(high_ends_at - 6)


def _lone(at: int) -> BadLine:
    message = f"half of a surrogate pair stands alone (col {at + 1})"
    return BadLine(ErrorCode.INVALID_ENCODING, message, column=at + 1)


def _json_problem(error: json.JSONDecodeError, text: str) -> BadLine:
    """The parser's complaint in plain words, with the column."""
    at, end = error.pos, len(text.rstrip())
    if error.msg.startswith("Unterminated string"):
        at, message = end, "ends inside a string"
    elif at >= end:
        at, message = end, "ends before the object is closed"
    elif error.msg.startswith("Invalid control character"):
        message = f"raw control character U+{ord(text[at]):04X} in a string"
    elif error.msg.startswith("Invalid") and "escape" in error.msg:
        message = "unknown escape in a string"
    elif error.msg.startswith("Extra data"):
        message = "text after the end of the object"
    else:
        expected = _EXPECTED.get(error.msg, "something else")
        message = f"expected {expected}, found {quoted(text[at])}"
    message += f" (col {at + 1})"
    return BadLine(ErrorCode.INVALID_JSON_LINE, message, column=at + 1)


_EXPECTED = {
    "Expecting value": "a value",
    "Expecting ',' delimiter": "a comma or a closing bracket",
    "Expecting ':' delimiter": "a colon",
    "Expecting property name enclosed in double quotes": "a key in double quotes",
    "Illegal trailing comma before end of object": "a key, not a trailing comma",
    "Illegal trailing comma before end of array": "a value, not a trailing comma",
}


def quoted(value: Any) -> str:
    """A value from the input as short JSON that is safe to print on a terminal."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:76] + '…"'
