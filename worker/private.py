"""The worker process of one `run`: started, watched, started again when it dies, stopped.

A lock file, inherited by the process, says exactly how long it lives. So after a crash of its
client the next `run` knows whether an orphan still works, and whose shards can be given back.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis

from dflash_batch.worker.binary import ENV_REDIS
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.queue import Queue
from dflash_batch.worker.settings import WorkerSettings

COMMAND = (sys.executable, "-m", "dflash_batch.worker.main", "--settings")

NO_MODEL = 4
"""Exit code of a worker that cannot load its model."""

RESTARTS = 5
"""Deaths in a row, with no row finished between them, before we give up."""

LONGEST_PAUSE_S = 30.0

ORPHAN_S = 10.0
"""How long the worker of a dead client may take to notice, before we end it."""

GRACE_S = 1.0
"""How long a worker that is told to stop may go on with its rows,"""

STOP_S = 5.0
"""and how much later it is killed."""


class ModelUnavailable(UserError):
    """Raised when the worker cannot load the model; the text is the worker's reason."""

    code = "model_not_found"


class WorkerFailed(UserError):
    """Raised when the worker dies again and again without finishing a row."""

    code = "worker_failed"


@dataclass
class PrivateWorker:
    """Keeps one worker process at work on one batch.

    `settings` need no name: each life gets a new one. `inherit` are descriptors it shall hold open.
    """

    queue: Queue
    folder: Path  # for its lock, its notices and its log
    batch_id: str
    settings: WorkerSettings
    inherit: tuple[int, ...] = ()
    only: bool = True  # it leases nothing but this batch; else `batch_id` merely names its files
    is_ready: bool = field(default=False, init=False)  # its model is loaded
    loaded: float | None = field(default=None, init=False)  # share of the model, if known
    name: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)
    _rows_done: int = field(default=0, init=False)
    _again: float = field(default=0.0, init=False)  # monotonic time of the next attempt
    _heard: int = field(default=0, init=False)  # bytes of notices taken in
    _trouble: str = field(default="", init=False)  # why its engine died last
    _orphan_since: float | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        """What the process said on stderr, over all its lives."""
        return self.folder / f"{self.batch_id}.log"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self, rows_done: int) -> str | None:
        """Start the process if it does not run and its pause is over; call it often.

        `rows_done` only grows; growth forgives earlier deaths. Returns news for the user. Raises
        ModelUnavailable and WorkerFailed.
        """
        if self._process is None:
            return self._start() if time.monotonic() >= self._again else None
        status = self._process.poll()
        news = self._listen()
        if status is None:
            return news
        self._process = None
        self.is_ready, self.loaded = False, None
        self._give_back(self.name)
        if status == NO_MODEL:
            raise ModelUnavailable(self._trouble or self._last_words(1))
        if rows_done > self._rows_done:
            self._failures, self._rows_done = 0, rows_done
        self._failures += 1
        if self._failures > RESTARTS:
            raise WorkerFailed(
                f"the worker died {self._failures} times without finishing a row "
                f"({_ending(status)}). Its log is {self.log}; it ends:\n{self._last_words(8)}"
            )
        pause = min(LONGEST_PAUSE_S, 0.25 * 2**self._failures)
        self._again = time.monotonic() + pause
        return f"the worker stopped ({_ending(status)}); it is started again in {pause:.1f} s"

    def stop(self) -> None:
        """Let the process finish what it can in a few seconds, and see that it is gone.

        That holds for the worker of a dead client too.
        """
        process, self._process = self._process, None
        if process is not None:
            _end(process)
            self._give_back(self.name)
        deadline = time.monotonic() + 2 * ORPHAN_S
        while (lock := self._taken_lock()) is None and time.monotonic() < deadline:
            self._wait_for_orphan()
            time.sleep(0.05)
        if lock is not None:
            os.close(lock)

    def forget(self) -> None:
        """Remove what a batch that is done leaves in the folder."""
        for path in (self.log, self._notices, self._lock):
            path.unlink(missing_ok=True)

    @property
    def _lock(self) -> Path:
        return self.folder / f"{self.batch_id}.worker"

    @property
    def _notices(self) -> Path:
        return self.folder / f"{self.batch_id}.notices"

    def _listen(self) -> str | None:
        """Take in what the process noted since last time; returns what a person should know."""
        with self._notices.open("rb") as file:
            file.seek(self._heard)
            lines = file.read().split(b"\n")[:-1]
        self._heard += sum(len(line) + 1 for line in lines)
        news = None
        for line in lines:
            match json.loads(line):
                case {"event": "loading", "share": share}:
                    self.loaded = share
                case {"event": "ready", "draft_notice": notice}:
                    self.is_ready, self.loaded = True, None
                    news = str(notice) if notice else news
                case {"event": "resting", "reason": str(reason)}:
                    news = f"the worker rests: {reason}" if reason else "the worker works again"
                case {"event": "engine_died", "reason": str(reason), "hopeless": hopeless}:
                    self.is_ready, self._trouble = False, reason
                    news = news if hopeless else f"the engine died ({reason}); it is started again"
        return news

    def _start(self) -> str | None:
        lock = self._taken_lock()
        if lock is None:
            self._again = time.monotonic() + 0.1
            return self._wait_for_orphan()
        try:
            self._orphan_since = None
            before = _read_note(self._lock)
            if before is not None:
                self._give_back(before["name"])
            self.name = f"{socket.gethostname()}-{uuid.uuid4().hex}"
            _write_note(lock, self.name, None)
            self._process = self._spawn(lock)
            _write_note(lock, self.name, self._process.pid)
        finally:
            os.close(lock)
        return None

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        self._notices.write_bytes(b"")
        self._heard = 0
        settings = replace(
            self.settings,
            name=self.name,
            batch_id=self.batch_id if self.only else None,
            parent_pid=os.getpid(),
            grace_s=GRACE_S,
            notices=str(self._notices),
        )
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*COMMAND, settings.to_json(with_url=False)],
                env=os.environ | {ENV_REDIS: settings.redis_url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock, *self.inherit),
                # A session of its own: Ctrl-C reaches us, and we stop it in good order.
                start_new_session=True,
            )

    def _taken_lock(self) -> int | None:
        """A descriptor that holds the lock, or None while a worker does."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _wait_for_orphan(self) -> str | None:
        """The worker of a client that was killed notices that soon; if not, it is ended."""
        now = time.monotonic()
        if self._orphan_since is None:
            self._orphan_since = now
            return "waiting for the worker of an earlier run to stop"
        note = _read_note(self._lock)
        if now - self._orphan_since > ORPHAN_S and note is not None and note["pid"]:
            # The lock is held, so this is its process and no other that got the number.
            with suppress(ProcessLookupError):
                os.kill(note["pid"], signal.SIGKILL)
        return None

    def _give_back(self, name: str) -> None:
        """Shards of a worker that is known to be dead need not wait for their lease to end."""
        if name:
            # Away with the server, they come back when the lease ends.
            with suppress(redis.RedisError):
                self.queue.beat(name, 1, ())

    def _last_words(self, lines: int) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that does not do or we are told to hurry."""
    try:
        process.terminate()
        process.wait(GRACE_S + STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.wait()


def _read_note(path: Path) -> dict[str, Any] | None:
    """Name and process number of the last worker that held the lock."""
    try:
        note = json.loads(path.read_bytes())
    except ValueError:
        return None
    return note if isinstance(note, dict) and "name" in note and "pid" in note else None


def _write_note(lock: int, name: str, pid: int | None) -> None:
    data = json.dumps({"name": name, "pid": pid}).encode()
    os.pwrite(lock, data, 0)
    os.ftruncate(lock, len(data))


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
