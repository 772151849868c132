"""Takes an upload apart as it arrives: the file goes to disk, and is never held in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from dflash_batch.worker.gateway.errors import ApiError

MAX_FIELD = 4096
"""Longest value of a field that is no file, and of a part's header, in bytes."""

MAX_PARTS = 32


@dataclass
class Upload:
    """The parts of one multipart body, fed to it in pieces."""

    path: Path  # where the part named `file` is written
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None until the file began
    _file: IO[bytes] | None = None
    _header: bytearray = field(default_factory=bytearray)
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _name_of_header: bytes = b""
    _value: bytearray = field(default_factory=bytearray)
    _name: str = ""
    _is_file: bool = False
    _parts: int = 0
    _ended: bool = False

    async def receive(self, request: Request) -> None:
        """Take the whole body. Raises ApiError; what is written stays at `path`."""
        kind, options = parse_options_header(request.headers.get("content-type"))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
            raise _bad("the body must be multipart/form-data with parts file and purpose")
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )
        try:
            async for chunk in request.stream():
                parser.write(chunk)
            parser.finalize()
            if not self._ended:
                raise _bad("the body ends before its last boundary")
            if self._file is not None:
                await run_in_threadpool(_to_disk, self._file)
        except MultipartParseError as error:
            raise _bad("the multipart body is malformed") from error
        except OSError as error:
            message = f"the upload cannot be stored: {error.strerror}"
            raise ApiError(507, message, code="storage_failed") from error
        finally:
            if self._file is not None:
                self._file.close()

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _bad("too many parts")
        self._headers, self._value = {}, bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        if self._name_of_header:
            self._header_end()
        self._header += data[start:end]
        _check_length(self._header)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        if not self._name_of_header:
            self._name_of_header, self._header = bytes(self._header).lower(), bytearray()
        self._header += data[start:end]
        _check_length(self._header)

    def _header_end(self) -> None:
        if self._name_of_header:
            self._headers[self._name_of_header] = bytes(self._header)
        self._name_of_header, self._header = b"", bytearray()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self._file is not None:
                raise _bad("more than one part is named file", "file")
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:255]
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = open(fd, "wb", buffering=1 << 20)  # noqa: SIM115  # closed by `receive`

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file and self._file is not None:
            self._file.write(data[start:end])
            return
        self._value += data[start:end]
        _check_length(self._value)

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _finish(self) -> None:
        self._ended = True


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_length(data: bytearray) -> None:
    if len(data) > MAX_FIELD:
        raise _bad(f"a field has more than {MAX_FIELD:,} bytes")


def _bad(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, code="invalid_request", param=param)
