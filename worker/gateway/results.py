"""Result lines while they are written, and the input lines of rows that failed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from dflash_batch.worker.reader import BOM
from dflash_batch.worker.strict_json import BadLine, parse_object

LOOK_S = 0.2
"""Seconds between looks for new lines."""

PIECE = 1 << 20
"""Most bytes taken from a file at once, but for a longer line."""


async def new_lines(paths: Sequence[Path], is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Whole lines of the files as they come, until all is read and nothing more will come."""
    places = [0] * len(paths)
    while True:
        was_over = is_over()  # before the look, or the last lines could be missed
        found = False
        for at, path in enumerate(paths):
            data = await run_in_threadpool(_whole_lines, path, places[at])
            places[at] += len(data)
            if data:
                found = True
                yield data
        if not found:
            if was_over:
                return
            await asyncio.sleep(LOOK_S)


def _whole_lines(path: Path, place: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(place)
        data = file.read(PIECE)
        while data and b"\n" not in data and (more := file.read(PIECE)):
            data += more
    return data[: data.rfind(b"\n") + 1]


def pick_failed(source: Path, failed: Path, into: Path) -> None:
    """Write the lines of the batch file `source` whose ids are in the error file `failed`."""
    with failed.open("rb") as file:
        ids = {json.loads(line)["custom_id"] for line in file}
    fd = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with source.open("rb") as file, open(fd, "wb") as chosen:
        for line in file:
            try:
                record = parse_object(line.removeprefix(BOM).strip())
            except BadLine:
                continue  # blank: a file with a bad line never ran
            if record.get("custom_id") in ids:
                chosen.write(line.removeprefix(BOM).rstrip(b"\r\n") + b"\n")
        chosen.flush()
        os.fsync(chosen.fileno())
