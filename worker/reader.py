"""Reads a batch file: bytes to validated rows and line errors, in one pass, whatever is in it.

Every line that is not blank becomes one `JobSpec` or one `LineError`. What a body's fields mean is
in fields.py; what a result line looks like is in lines.py.
"""

from __future__ import annotations

import gc
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from dflash_batch.worker.contract import (
    CHAT,
    MAX_CUSTOM_ID,
    TEXT,
    Endpoint,
    ErrorCode,
    JobSpec,
    Record,
)
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.fields import BodyError, parse_body
from dflash_batch.worker.seen import Seen
from dflash_batch.worker.spool import Spool
from dflash_batch.worker.strict_json import BadLine, parse_object, quoted

MAX_LINES = 1_000_000
MAX_BYTES = 8 << 30
MAX_LINE_BYTES = 64 << 20
"""Limits that catch the wrong file, not a large one. A longer line is a line error."""

MAX_METADATA_DEPTH = 32
"""Deepest nesting of `metadata`: it goes through encoders that have limits of their own."""

BOM = b"\xef\xbb\xbf"

Progress = Callable[[int], None]
"""Called now and then with the bytes read so far."""


class LineError(Record):
    """Why one line cannot be run: its first problem, and the others named in the message."""

    line: int  # 1-based
    code: ErrorCode
    message: str
    param: str | None = None
    custom_id: str | None = None
    column: int | None = None  # 1-based, in characters, where the place is known


class InputError(UserError):
    """Raised when the input as a whole is no batch: empty, or beyond the limits."""

    code = "invalid_input"


@dataclass(frozen=True)
class Reading:
    """What one pass over the input found."""

    rows: Sequence[JobSpec]  # indices 0, 1, 2, … in the order of the lines
    errors: list[LineError]  # in the order of the lines
    warnings: list[str]  # one a kind, for people
    digest: str  # sha256 of all bytes, hex
    lines: int  # blank ones included
    bytes: int
    ignored: dict[str, int]  # body fields without effect: lines that have them
    models: dict[str, int]  # models named by the lines that can be run

    @property
    def requests(self) -> int:
        """Lines that are not blank."""
        return len(self.rows) + len(self.errors)


class Rows(Protocol):
    """Where rows are put as they are read."""

    def append(self, row: JobSpec, /) -> None: ...
    def keep(self, indices: Iterable[int]) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> JobSpec: ...


class RowList(list[JobSpec]):
    """Rows in memory."""

    def keep(self, indices: Iterable[int]) -> None:
        """Leave only these rows, numbered anew in their order."""
        self[:] = [self[index].model_copy(update={"index": at}) for at, index in enumerate(indices)]


def read_lines(
    stream: BinaryIO,
    *,
    default_model: str | None,
    spool: Spool | None = None,
    progress: Progress = lambda done: None,
    max_lines: int = MAX_LINES,
    max_bytes: int = MAX_BYTES,
) -> Reading:
    """Reads the whole stream. Raises InputError, and OSError from the stream.

    The rows are kept in memory, or in a `spool`, which may raise SpoolFailed.

    Without `default_model` a file names its models itself: if any line does, a line that does not
    is an error; if none does, `Reading.models` is empty and the caller has to ask.
    """
    rows = RowList() if spool is None else spool
    scan = _Scan(default_model, rows)
    digest = hashlib.sha256()
    number = size = 0
    with _collector_at_rest():
        for number, raw in _raw_lines(stream, digest.update, max_bytes):
            if number > max_lines:
                raise InputError(f"more than {max_lines:,} lines: cut it into several batches")
            size += raw.size
            scan.line(number, raw)
            if number % 2000 == 0:
                progress(size)
    progress(size)
    if size == 0:
        raise InputError("the file is empty")
    if not scan.rows and not scan.errors:
        raise InputError(f"no requests: all {number:,} lines are blank")
    scan.settle_models()
    return Reading(
        rows=rows,
        errors=scan.errors,
        warnings=scan.warnings(),
        digest=digest.hexdigest(),
        lines=number,
        bytes=size,
        ignored=dict(scan.ignored.most_common()),
        models=dict(scan.models.most_common()),
    )


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """All that is read is kept, so looking through it for garbage costs a third and finds none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Raw(NamedTuple):
    """One line as it stands in the file."""

    data: bytes | None  # without BOM, LF and one CR before it; None: too long to keep
    size: int  # bytes taken in the file


def _raw_lines(
    stream: BinaryIO, seen: Callable[[bytes], object], max_bytes: int
) -> Iterator[tuple[int, _Raw]]:
    """Lines split on LF only, numbered from 1. `seen` gets every byte."""
    number = total = 0
    while data := stream.readline(MAX_LINE_BYTES):
        number += 1
        seen(data)
        size = len(data)
        kept: bytes | None = data
        while not data.endswith(b"\n") and len(data) == MAX_LINE_BYTES:
            kept = None  # the rest is read to be counted and left out
            data = stream.readline(MAX_LINE_BYTES)
            seen(data)
            size += len(data)
        total += size
        if total > max_bytes:
            raise InputError(f"larger than {max_bytes:,} bytes: cut it into several batches")
        if kept is not None:
            if number == 1:
                kept = kept.removeprefix(BOM)
            kept = kept.removesuffix(b"\n").removesuffix(b"\r")
        yield number, _Raw(kept, size)


Notice = Literal["method", "url", "bare", "keys"]

_NOTICES: dict[Notice, str] = {
    "method": "no method: POST assumed",
    "url": "no url: taken from messages or prompt",
    "bare": "bare body without custom_id: ids made of line numbers",
    "keys": "unknown top-level keys ignored",
}


class _Scan:
    """The state of one pass: what was found so far."""

    def __init__(self, default_model: str | None, rows: Rows) -> None:
        self.rows = rows
        self.errors: list[LineError] = []
        self.ignored: Counter[str] = Counter()
        self.models: Counter[str] = Counter()
        self._default_model = default_model
        self._seen = Seen()
        self._first_use = 0  # line on which the id of the line at hand was used first
        self._unnamed = array("I")  # rows whose line names no model
        self._open_ended = [0, 0]  # lines without max_tokens: how many, the first
        self._notices: dict[Notice, list[int]] = {}  # kind -> lines, first line
        self._unknown_keys: Counter[str] = Counter()

    def line(self, number: int, raw: _Raw) -> None:
        if raw.data is not None and not raw.data.strip(b" \t\r\n"):
            return
        custom_id = None
        try:
            if raw.data is None:
                message = f"longer than {MAX_LINE_BYTES >> 20} MiB"
                raise BadLine(ErrorCode.INVALID_VALUE, message)
            line = parse_object(raw.data)
            custom_id = self._custom_id(line, number)
            row = self._row(line, number, custom_id)
        except BadLine as problem:
            self.errors.append(
                LineError(
                    line=number,
                    code=problem.code,
                    message=problem.message,
                    param=problem.param,
                    custom_id=custom_id,
                    column=problem.column,
                )
            )
            return
        if row.model is not None:
            self.models[row.model] += 1
        else:
            self._unnamed.append(row.index)
        if row.max_tokens is None:
            self._open_ended = [self._open_ended[0] + 1, self._open_ended[1] or number]
        self.rows.append(row)

    def _custom_id(self, line: dict[str, Any], number: int) -> str | None:
        """The line's id if it has a usable one, made up for bare bodies; notes its use.

        A wrong id is left for `_row` to report, so that a line error carries whatever id there is.
        """
        value = line.get("custom_id")
        if value is None and _is_bare(line):
            value = f"line-{number:06d}"
        if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID:
            return None
        self._first_use = self._seen.first_use(value, number)
        return value

    def _row(self, line: dict[str, Any], number: int, custom_id: str | None) -> JobSpec:
        if custom_id is None:
            raise _bad_id(line)
        if self._first_use != number:
            message = f"{quoted(custom_id)} first used on line {self._first_use}"
            raise BadLine(ErrorCode.DUPLICATE_CUSTOM_ID, message, param="custom_id")
        metadata = _metadata(line)
        notices: list[Notice] = []
        unknown: list[str] = []
        if _is_bare(line):
            body = {key: line[key] for key in line if key not in ("custom_id", "metadata")}
            endpoint = _inferred(body)
            notices += ["bare"] if "custom_id" not in line else []
        else:
            if line.get("method") is None:
                notices.append("method")
            elif line["method"] != "POST":
                message = f"method must be POST, not {quoted(line['method'])}"
                raise BadLine(ErrorCode.INVALID_VALUE, message, param="method")
            body = _body(line)
            if line.get("url") is None:
                notices.append("url")
                endpoint = _inferred(body)
            else:
                endpoint = _endpoint(line["url"])
            unknown = [key for key in line if key not in _TOP_LEVEL]
        try:
            values, ignored = parse_body(body, endpoint)
        except BodyError as error:
            first = error.problems[0]
            raise BadLine(first.code, str(error), param=first.param) from error
        if unknown:
            notices.append("keys")
        for notice in notices:
            self._notices.setdefault(notice, [0, number])[0] += 1
        for key in unknown:
            self._unknown_keys[key] += 1
        for name in ignored:
            self.ignored[name] += 1
        values.setdefault("stop", [])  # given, they need not be copied from the defaults
        values.setdefault("stop_token_ids", [])
        values.setdefault("logit_bias", {})
        return JobSpec(
            index=len(self.rows),
            line=number,
            custom_id=custom_id,
            endpoint=endpoint,
            metadata=metadata,
            **values,
        )

    def settle_models(self) -> None:
        """Without a default, one line that names its model makes it a duty of all."""
        if self._default_model is not None or not self.models:
            return
        for index in self._unnamed:
            row = self.rows[index]
            self.errors.append(
                LineError(
                    line=row.line,
                    code=ErrorCode.MISSING_REQUIRED_PARAMETER,
                    message="model is missing: other lines name one; or give -m",
                    param="model",
                    custom_id=row.custom_id,
                )
            )
        if self._unnamed:
            self.errors.sort(key=lambda error: error.line)
            unnamed = set(self._unnamed)
            self.rows.keep(at for at in range(len(self.rows)) if at not in unnamed)

    def warnings(self) -> list[str]:
        found = []
        for kind, (count, first) in self._notices.items():
            text = _NOTICES[kind]
            if kind == "keys":
                text += f" ({_listed(self._unknown_keys)})"
            found.append(f"{_lines(count)}: {text} (first: line {first})")
        if self.ignored:
            found.append(f"fields without effect on the text: {_counted(self.ignored)}")
        count, first = self._open_ended
        if count:
            found.append(
                f"{_lines(count)}: no max_tokens: the default is used (first: line {first})"
            )
        others = {name: n for name, n in self.models.items() if name != self._default_model}
        if self._default_model is not None and others:
            found.append(
                f"{_lines(sum(others.values()))}: another model is named ({_listed(others)}); "
                f"{self._default_model} answers"
            )
        return found


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def _listed(names: dict[str, int], most: int = 5) -> str:
    """The first few names, shortened, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name[:60] for name in list(names)[:most]) + more


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({_lines(count)})" for name, count in names.most_common())


# The envelope around the body

_TOP_LEVEL = frozenset({"custom_id", "method", "url", "body", "metadata"})


def _is_bare(line: dict[str, Any]) -> bool:
    """Whether the line is a body itself."""
    if "body" in line or "url" in line or "method" in line:
        return False
    return "messages" in line or "prompt" in line


def _bad_id(line: dict[str, Any]) -> BadLine:
    value = line.get("custom_id")
    if value is None:
        hint = ""
        if "key" in line and "request" in line:
            hint = ": this looks like a Gemini batch line, which is not read yet"
        message = f"custom_id is missing{hint}"
        return BadLine(ErrorCode.MISSING_REQUIRED_PARAMETER, message, param="custom_id")
    if not isinstance(value, str):
        message = "custom_id must be a string"
    elif not value:
        message = "custom_id must not be empty"
    else:
        message = f"custom_id has {len(value):,} characters; at most {MAX_CUSTOM_ID:,} are allowed"
    return BadLine(ErrorCode.INVALID_VALUE, message, param="custom_id")


def _body(line: dict[str, Any]) -> dict[str, Any]:
    body = line.get("body")
    if body is None:
        hint = ""
        if "params" in line:
            hint = ": this looks like an Anthropic batch line, which is not read yet"
        elif "messages" in line or "prompt" in line:
            hint = ": messages, prompt and parameters belong into it"
        message = f"body is missing{hint}"
        raise BadLine(ErrorCode.MISSING_REQUIRED_PARAMETER, message, param="body")
    if not isinstance(body, dict):
        raise BadLine(ErrorCode.INVALID_VALUE, "body must be an object", param="body")
    return body


def _endpoint(url: Any) -> Endpoint:
    if not isinstance(url, str):
        raise BadLine(ErrorCode.INVALID_VALUE, "url must be a string", param="url")
    for endpoint in (CHAT, TEXT):
        if url == endpoint:
            return endpoint
    message = f"{quoted(url)} is not served; use {CHAT} or {TEXT}"
    raise BadLine(ErrorCode.UNSUPPORTED_ENDPOINT, message, param="url")


def _inferred(body: dict[str, Any]) -> Endpoint:
    chat, text = body.get("messages") is not None, body.get("prompt") is not None
    if chat and text:
        message = "both messages and prompt are given, and no url says which to use"
        raise BadLine(ErrorCode.MISMATCHED_ENDPOINT, message, param="prompt")
    if not chat and not text:
        message = "messages or prompt is missing"
        raise BadLine(ErrorCode.MISSING_REQUIRED_PARAMETER, message, param="messages")
    return CHAT if chat else TEXT


def _metadata(line: dict[str, Any]) -> dict[str, Any] | None:
    value = line.get("metadata")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadLine(ErrorCode.INVALID_VALUE, "metadata must be an object", param="metadata")
    level: list[Any] = [value]
    for _ in range(MAX_METADATA_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    message = f"metadata is nested more than {MAX_METADATA_DEPTH} deep"
    raise BadLine(ErrorCode.INVALID_VALUE, message, param="metadata")
