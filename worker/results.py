"""Results on disk: whole lines, each row once, and their totals.

A file identifies itself: the `id` of every line is a hash of batch and row. So what is written is
always read from the files alone, and a file that holds anything else is somebody else's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dflash_batch.worker.appender import Appender, OutputFailed, OutputTaken
from dflash_batch.worker.contract import RowResult
from dflash_batch.worker.lines import is_error, output_line, rejected_line, row_hash
from dflash_batch.worker.queue import Queue
from dflash_batch.worker.reader import LineError

__all__ = ["OutputFailed", "OutputTaken", "ResultFiles", "Tail", "Totals"]

SYNC_ROWS = 1000
"""Rows that may be written before they are forced to disk and acknowledged,"""

SYNC_S = 1.0
"""or the seconds, whichever comes first."""

_START = b'{"id":"batch_req_'
"""How each of our lines begins: what tells a torn line of ours from a stranger's."""


@dataclass
class Totals:
    """Sums over all lines written for a batch, however many runs it took.

    `cached_tokens + prefill_tokens == prompt_tokens` over rows that ran. Lines that were rejected
    count as requests that failed.
    """

    batch: str
    output: str
    errors: str | None = None  # None while nothing failed
    requests: int = 0
    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0  # really computed
    cached_tokens: int = 0
    completion_tokens: int = 0
    cycles: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    elapsed_s: float = 0.0
    choices: int = 0
    reasoning_tokens: int = 0  # of the completion tokens

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens a decoding cycle yields: 1 without a draft, 0 while there was no cycle.

        A choice's first token comes from prefill and is not counted.
        """
        return (self.completion_tokens - self.choices) / self.cycles if self.cycles else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The object that `run --json` prints."""
        return {
            "batch": self.batch,
            "requests": self.requests,
            "ok": self.ok,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens": self.prefill_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "cycles": self.cycles,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "tokens_per_cycle": round(self.tokens_per_cycle, 4),
            "elapsed_s": round(self.elapsed_s, 3),
            "output": self.output,
            "errors": self.errors,
        }

    def add(self, response: dict[str, Any] | None) -> None:
        """Count the row whose line has this `response`: live or read back, the figures agree."""
        body = (response or {}).get("body") or {}
        if response is None or response.get("status_code") != 200:
            self.failed += 1
        else:
            self.ok += 1
            self.choices += len(body.get("choices") or ())
        usage = body.get("usage") or {}
        facts = body.get("dflash") or {}
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or 0
        details = usage.get("completion_tokens_details") or {}
        self.reasoning_tokens += details.get("reasoning_tokens") or 0
        self.prefill_tokens += facts.get("prefill_tokens") or 0
        self.cached_tokens += facts.get("cached_tokens") or 0
        self.cycles += facts.get("cycles") or 0
        self.draft_tokens += facts.get("draft_tokens") or 0
        self.accepted_tokens += facts.get("accepted_tokens") or 0


class ResultFiles:
    """The output file and the error file of a batch; only one process at a time holds them.

    Opening reads back what is there and cuts off a line that a crash left half written. `rows`
    gives the index of each `custom_id`; `rejected` lines are written before the first result.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        *,
        batch_id: str,
        rows: Mapping[str, int],
        rejected: Sequence[LineError] = (),
        fresh: bool = False,
    ) -> None:
        """With `fresh` all that the files hold is thrown away.

        Raises OutputTaken and OutputFailed.
        """
        self.batch_id = batch_id
        self.written: set[int] = set()
        self.repaired = 0  # torn lines removed at opening
        self.totals = Totals(
            batch_id, str(output), requests=len(rows) + len(rejected), failed=len(rejected)
        )
        self._rows = rows
        self._rejected = {error.line: error for error in rejected}  # not written yet
        self._output = Appender(output)
        self._errors = Appender(errors)
        try:
            _check_places(output, errors)
            self._output.open()  # before reading: what another command writes must be seen
            for file in (self._output, self._errors):
                if fresh:
                    file.empty()
                self._read_back(file)
            self._note_errors_file()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, results: Sequence[RowResult]) -> int:
        """Append the results of rows that are not written yet; returns how many there were.

        They are not safe before `sync`. Raises OutputFailed; lines already whole are kept.
        """
        self._write_rejected()
        new = self._unwritten(results)
        for file, failed in ((self._output, False), (self._errors, True)):
            chosen = [result for result in new if is_error(result) is failed]
            if chosen:
                file.append("".join(output_line(result, self.batch_id) for result in chosen))
            for result in chosen:
                self.written.add(result.index)
                self.totals.add(result.response)
        self._note_errors_file()
        return len(new)

    def sync(self) -> None:
        """Force all that was written to disk. Raises OutputFailed."""
        self._output.sync()
        self._errors.sync()

    def finish(self) -> None:
        """Nothing more will come: see that all is on disk. Raises OutputFailed."""
        self._write_rejected()
        self.sync()

    def close(self) -> None:
        """Give the files back; may be called twice."""
        self._output.close()
        self._errors.close()

    def _unwritten(self, results: Sequence[RowResult]) -> list[RowResult]:
        """The first record of each row wins, as in the queue; other batches' rows are no rows."""
        fresh: dict[int, RowResult] = {}
        for result in results:
            ours = self._rows.get(result.custom_id) == result.index
            if ours and result.index not in self.written:
                fresh.setdefault(result.index, result)
        return list(fresh.values())

    def _write_rejected(self) -> None:
        # Not at opening: a run that fails before its first result leaves no line of its batch.
        if self._rejected:
            lines = [rejected_line(error, self.batch_id) for error in self._rejected.values()]
            self._errors.append("".join(lines))
            self._rejected = {}
            self._note_errors_file()

    def _note_errors_file(self) -> None:
        if self.totals.failed and self._errors.path.exists():
            self.totals.errors = str(self._errors.path)

    def _read_back(self, file: Appender) -> None:
        """Take in the lines of `file` and remove what a crash left torn."""
        torn: list[tuple[int, int]] = []
        end = 0  # of the last whole line
        for start, line in file.lines():
            record = _parsed(line)
            if not line.strip():
                continue
            if record is not None and self._take(record):
                end = start + len(line)
            elif record is None and _is_torn(line):
                torn.append((start, start + len(line)))
            else:
                raise OutputTaken(
                    f"{file.path} holds something other than the results of {self.batch_id}. "
                    "Name another file with -o, or replace it with --new."
                )
        if torn:
            file.remove(torn, end)
            self.repaired += len(torn)

    def _take(self, record: dict[str, Any]) -> bool:
        """Count the line if it belongs to this batch."""
        custom_id = record.get("custom_id")
        rejected = record.get("line")
        row = self._rows.get(custom_id) if isinstance(custom_id, str) else None
        name: int | str | None = row if rejected is None else f"line {rejected}"
        if name is None or record.get("id") != f"batch_req_{row_hash(self.batch_id, name)}":
            return False
        if rejected is not None:
            self._rejected.pop(rejected, None)
        elif row is not None and row not in self.written:
            self.written.add(row)
            self.totals.add(record.get("response"))
        return True


class Tail:
    """Brings a batch's result stream into files: written, then on disk, then acknowledged."""

    def __init__(self, queue: Queue, batch_id: str, files: ResultFiles, after: str) -> None:
        """`after` is the stream id up to which results are on disk (`BatchStatus.exported`)."""
        self._queue = queue
        self._batch = batch_id
        self._files = files
        self._after = after
        self._acknowledged = after
        self._unsynced = 0
        self._synced = time.monotonic()

    def pull(self, block_ms: int) -> int:
        """Take what is there, waiting up to `block_ms` if nothing is; returns entries taken.

        Raises OutputFailed, and redis.RedisError.
        """
        entries = self._queue.results(self._batch, self._after, block_ms=block_ms)
        if entries:
            self._files.write([result for _, result in entries])
            self._after = entries[-1][0]
            self._unsynced += len(entries)
        late = time.monotonic() - self._synced > SYNC_S
        if self._unsynced >= SYNC_ROWS or (self._unsynced and late):
            self.settle()
        return len(entries)

    def settle(self) -> None:
        """Force to disk what was taken, then let the queue drop it."""
        self._files.sync()
        self._synced = time.monotonic()
        self._unsynced = 0
        if self._after != self._acknowledged:
            self._queue.acknowledge(self._batch, self._after)
            self._acknowledged = self._after


def _check_places(output: Path, errors: Path) -> None:
    """Refuse what cannot be right before anything is made."""
    if output.absolute() == errors.absolute():
        raise OutputTaken(f"{output} cannot take both results and errors; name another with -o.")
    for path in (output, errors):
        if path.exists() and not path.is_file():
            raise OutputTaken(f"{path} is not a regular file; name one with -o.")
        if not path.parent.is_dir():
            raise OutputFailed(f"cannot write {path}: there is no folder {path.parent}.")


def _is_torn(line: bytes) -> bool:
    """Whether it may be what is left of a line of ours; a power failure leaves zeros in a file."""
    head, _, _ = line.partition(b"\0")
    return head.startswith(_START) or _START.startswith(head)


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
