"""The pipe between supervisor and engine: the records, and the two ends of a socket pair.

One record is one line of JSON; `kind` says which. The supervisor's end never blocks: a stuck
engine must not stop its beats. The engine's end has a reader thread, so that what the supervisor
sends is always taken, and the end of the supervisor is seen at once.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dflash_batch.worker.contract import JobSpec, ModelRef, Record, RowResult, Spec

_READ = 1 << 18


class Load(Record):
    """First word to an engine: what to load, and for whom."""

    kind: Literal["load"] = "load"
    model: ModelRef
    worker: str
    max_batch: int
    max_context: int | None = None
    spec: Spec = "auto"
    cost_dir: str | None = None
    cache_dir: str | None = None
    cache_bytes: int | None = None
    memory: int | None = None
    diagnostics: str | None = None


class Admit(Record):
    """Rows to run."""

    kind: Literal["admit"] = "admit"
    shard_id: str
    epoch: int
    rows: list[JobSpec]
    tried: dict[int, int] = Field(default_factory=dict)  # row index -> attempts that failed


class Drop(Record):
    """Rows of this shard are not wanted any more."""

    kind: Literal["drop"] = "drop"
    shard_id: str


class AskBack(Record):
    """Hand back half of the rows that are not started, the last ones: others are idle."""

    kind: Literal["ask_back"] = "ask_back"


class Hold(Record):
    """Stand still, or go on: rows stay where they are."""

    kind: Literal["hold"] = "hold"
    on: bool


class Narrow(Record):
    """Take in no more than so many rows at once from here on."""

    kind: Literal["narrow"] = "narrow"
    rows: int


class Stop(Record):
    """End, whatever is in hand."""

    kind: Literal["stop"] = "stop"


class Loading(Record):
    """How far the load is; share 0..1, None when unknown."""

    kind: Literal["loading"] = "loading"
    phase: str
    share: float | None = None


class Ready(Record):
    """The model is loaded: its effective settings."""

    kind: Literal["ready"] = "ready"
    target: str
    draft: str | None = None
    draft_notice: str | None = None
    block: int
    dtype: str
    context_length: int


class Failed(Record):
    """The engine cannot go on, and ends. Before Ready: the model cannot be loaded."""

    kind: Literal["failed"] = "failed"
    code: str
    message: str


class RowDone(Record):
    """A row has ended."""

    kind: Literal["row"] = "row"
    shard_id: str
    epoch: int
    result: RowResult


class Returned(Record):
    """Rows that were not started and are not in the engine any more."""

    kind: Literal["returned"] = "returned"
    shard_id: str
    epoch: int
    rows: list[int]  # indices


class Beat(Record):
    """At least once a second. `steps` stands still when the decoder does."""

    kind: Literal["beat"] = "beat"
    steps: int
    waiting: int
    active: int
    tokens: int  # completed since the start


class Bye(Record):
    """The engine ends because it was asked to."""

    kind: Literal["bye"] = "bye"


Command = Load | Admit | Drop | AskBack | Hold | Narrow | Stop
Report = Loading | Ready | Failed | RowDone | Returned | Beat | Bye

_command: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_report: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


class PipeClosed(Exception):
    """Raised when the other end of the pipe is gone."""


class SupervisorEnd:
    """The end that never blocks. What does not fit is kept, and sent by the next `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self._unread = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, command: Command) -> None:
        """Queue a command, and send as much as fits now."""
        self._unsent += _line(command)
        self.flush()

    def flush(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:  # the engine is gone; reading says so as well
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[Report]:
        """The reports that have come; sets `closed` when no more can come."""
        while not self.closed:
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        return [_report.validate_json(bytes(line)) for line in lines]

    def close(self) -> None:
        self._sock.close()
        self.closed = True


class EngineEnd:
    """The end that may block. The reader thread calls `on_eof` when the supervisor has ended."""

    def __init__(self, sock: socket.socket, on_eof: Callable[[], None]) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._on_eof = on_eof
        self._sending = threading.Lock()
        self._arrived: deque[Command] = deque()
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="pipe", daemon=True)
        self._reader.start()

    def send(self, report: Report) -> None:
        """Send a report; by any thread. Raises PipeClosed."""
        with self._sending:
            try:
                self._sock.sendall(_line(report))
            except OSError as error:
                raise PipeClosed from error

    def take(self, timeout_s: float | None = 0.0) -> list[Command]:
        """The commands that have come. Waits for one up to `timeout_s`, None: for ever."""
        with self._news:
            self._news.wait_for(lambda: self._arrived, timeout_s)
            commands = list(self._arrived)
            self._arrived.clear()
        return commands

    def first(self) -> Command:
        """The next command; waits for it."""
        with self._news:
            self._news.wait_for(lambda: self._arrived)
            return self._arrived.popleft()

    def _read(self) -> None:
        with self._sock.makefile("rb") as lines, suppress(OSError):
            # a supervisor that dies with reports unread resets the connection
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                command = _command.validate_json(line)
                with self._news:
                    self._arrived.append(command)
                    self._news.notify()
        self._on_eof()


def _line(record: Record) -> bytes:
    return record.dump().encode() + b"\n"
