"""What `run` does: queue a batch, keep a private worker at it, bring the results into files.

Every step can be interrupted at any point and repeated: the queue knows rows until their results
are on disk, the files know them from then on, and rows that neither knows are queued again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from dflash_batch.worker.appender import OutputTaken
from dflash_batch.worker.conditions import ALWAYS
from dflash_batch.worker.contract import BatchState, JobSpec, ModelRef, Spec
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.follow import Follower, QueueLost
from dflash_batch.worker.home import cost_dir, pending_dir, private_dir
from dflash_batch.worker.journal import Journal, Run, open_journal
from dflash_batch.worker.locks import locked
from dflash_batch.worker.private import PrivateWorker
from dflash_batch.worker.progress import Reporter, Watcher
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.reader import LineError
from dflash_batch.worker.results import ResultFiles, Totals
from dflash_batch.worker.server import EmbeddedServer, check_server, given_url
from dflash_batch.worker.settings import ENGINE_COMMAND, WorkerSettings
from dflash_batch.worker.stopping import stoppable
from dflash_batch.worker.submit import batch_id_for, submit

REMEMBER_S = 2.0
"""Seconds between notes of the time spent."""

FRUITLESS = 3
"""Rounds in succession that bring no row before we give up."""


class BatchBusy(UserError):
    """Raised when another command of this home runs the same batch."""

    code = "batch_busy"


class Interrupted(Exception):
    """Raised when Ctrl-C or SIGTERM stops a run. The batch stays; the same command continues it."""

    def __init__(self, batch: str, done: int, total: int) -> None:
        super().__init__(f"{batch} interrupted with {done:,} of {total:,} rows written")
        self.batch = batch
        self.done = done
        self.total = total


@dataclass(frozen=True)
class RunOptions:
    """What to run, where its results go, and with what."""

    digest: str  # of the input (`Reading.digest`): the same input continues the same batch
    name: str  # of the input, for people
    model: ModelRef
    output: Path
    errors: Path
    home: Path
    redis: str | None = None  # None: DFLASH_BATCH_REDIS, else the embedded server
    insecure: bool = False  # `redis` may be where others can read along
    new: bool = False  # start over, replacing the files
    max_batch: int = 16
    lease_ttl_s: float = 45.0
    max_context: int | None = None
    spec: Spec = "on"
    cache_dir: str | None = None  # prefixes on SSD
    cache_bytes: int | None = None
    memory: int | None = None  # bytes on the device
    diagnostics: str | None = None  # folder
    engine_command: tuple[str, ...] = ENGINE_COMMAND


def run_batch(
    rows: Sequence[JobSpec], bad: Sequence[LineError], options: RunOptions, watch: Watcher
) -> Totals:
    """Run `rows` to the end, and give the totals of the whole batch, earlier sessions included.

    `bad` are lines to be written as failed. Raises Interrupted, or a UserError: OutputTaken,
    OutputFailed, HomeError, ServerStartError, ServerUnfit, QueueExposed, QueueUnreachable,
    QueueLost, BatchBusy, ModelUnavailable, WorkerFailed, BatchLost. After each of them the same
    command continues.
    """
    with open_journal(options.home) as journal, stoppable() as stop:
        session = _Session(rows, bad, options, watch, journal, stop)
        try:
            return session.run()
        except KeyboardInterrupt as error:
            raise session.interrupted() from error
        except redis.RedisError as error:
            raise QueueLost(f"the queue failed: {error}. Run the same command again.") from error


class _Session:
    """One call of run_batch."""

    def __init__(
        self,
        rows: Sequence[JobSpec],
        bad: Sequence[LineError],
        options: RunOptions,
        watch: Watcher,
        journal: Journal,
        stop: threading.Event,
    ) -> None:
        self.rows = rows
        self.bad = bad
        self.options = options
        self.watch = watch
        self.stop = stop
        self._journal = journal
        self._began = time.monotonic()
        self._remembered = self._began
        self._done = 0
        self._earlier_s = 0.0
        self.entry = self._new_run("run")

    def run(self) -> Totals:
        with self._alone(), self._files() as files:
            if self.entry.state == "replacing":
                self._save(state="running")
            missing = self._missing(files)
            if missing or self.entry.queued or self.entry.replaced:
                with self._queue() as (queue, server):
                    self._dismiss(queue, server, self.entry.replaced)
                    self._save(replaced="")
                    self._rounds(queue, server, files, missing)
                    files.sync()
                    self._clear(queue, server)
            files.finish()
            if missing or self.entry.state != "done":
                self._save(state="done", elapsed_s=self.elapsed_s)
            files.totals.elapsed_s = self.entry.elapsed_s
            return files.totals

    @property
    def elapsed_s(self) -> float:
        """Seconds spent on the batch, earlier sessions included."""
        return self._earlier_s + time.monotonic() - self._began

    def interrupted(self) -> Interrupted:
        """What to raise when the user stopped us."""
        return Interrupted(self.entry.batch, self._done, len(self.rows))

    def _claim(self) -> Run:
        """The journal's run if it is this one, else a new one, which is noted before it begins."""
        options = self.options
        found = self._journal.find(options.output)
        same = (
            found is not None
            and found.digest == options.digest
            and found.model_key == options.model.key
        )
        if found is not None and same and not options.new:
            return found
        entry = self._new_run(f"run {uuid.uuid4().hex}" if options.new else "run")
        if found is not None:
            entry = entry.model_copy(update={"replaced": found.queued})
        if options.new:
            entry = entry.model_copy(update={"state": "replacing"})
            self._journal.save(options.output, entry)
        return entry

    def _new_run(self, salt: str) -> Run:
        """The id is not the one `submit` gives: what is submitted stays there for `results`."""
        return Run(
            batch=batch_id_for(self.options.digest, self.options.model, salt),
            digest=self.options.digest,
            model_key=self.options.model.key,
            name=self.options.name,
        )

    def _save(self, **changes: Any) -> None:
        self.entry = self.entry.model_copy(update=changes)
        self._journal.save(self.options.output, self.entry)
        self._remembered = time.monotonic()

    def _remember(self) -> None:
        """Note the time spent now and then; a kill loses no more than what came after."""
        if time.monotonic() - self._remembered > REMEMBER_S:
            self._save(elapsed_s=self.elapsed_s)

    @property
    def _folder(self) -> Path:
        return private_dir(self.options.home / "runs")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Claim the output file, then the batch: two clients on one would each get half of it."""
        output = hashlib.sha256(os.fsencode(self.options.output.absolute())).hexdigest()[:24]
        with ExitStack() as stack:
            if not stack.enter_context(locked(self._folder / f"{output}.output")):
                raise OutputTaken(
                    f"{self.options.output} is being written by another command; wait for it, or "
                    "name another file with -o."
                )
            self.entry = self._claim()
            self._earlier_s = self.entry.elapsed_s
            if not stack.enter_context(locked(self._folder / f"{self.entry.batch}.client")):
                raise BatchBusy(
                    f"{self.entry.batch} is being run by another command; wait for it, or start a "
                    "separate run with --new."
                )
            yield

    def _files(self) -> ResultFiles:
        self.watch.on_phase("reading results on disk", None)
        files = ResultFiles(
            self.options.output,
            self.options.errors,
            batch_id=self.entry.batch,
            rows={row.custom_id: row.index for row in self.rows},
            rejected=self.bad,
            fresh=self.entry.state == "replacing",
        )
        self._done = len(files.written)
        if files.repaired:
            self.watch.on_note(f"removed {files.repaired} half-written line(s) of an earlier run")
        return files

    def _missing(self, files: ResultFiles) -> list[JobSpec]:
        return [row for row in self.rows if row.index not in files.written]

    @contextmanager
    def _queue(self) -> Iterator[tuple[Queue, EmbeddedServer | None]]:
        """The queue, and the server behind it if that is the embedded one."""
        url = given_url(self.options.redis)
        with ExitStack() as stack:
            self.watch.on_phase("starting the queue", None)
            server = None
            if url is None:
                server = stack.enter_context(EmbeddedServer(self.options.home))
                url = server.url
            else:
                check_server(url, insecure=self.options.insecure)
            client = connect(url)
            stack.callback(client.close)
            yield Queue(client), server

    def _rounds(
        self,
        queue: Queue,
        server: EmbeddedServer | None,
        files: ResultFiles,
        missing: Sequence[JobSpec],
    ) -> None:
        """Queue and follow what is missing until nothing is: one round, unless rows get lost."""
        fruitless = 0
        while missing:
            self._queued(queue, missing)
            self._follow(queue, server, files, len(missing))
            self._clear(queue, server)
            before, missing = len(missing), self._missing(files)
            fruitless = fruitless + 1 if len(missing) == before else 0
            if fruitless == FRUITLESS:
                raise QueueLost(
                    f"{before:,} rows were queued {FRUITLESS} times and none came back. Does "
                    "another program take results from this queue, or empty it? Run the same "
                    "command again."
                )

    def _queued(self, queue: Queue, missing: Sequence[JobSpec]) -> None:
        """See that a batch that has the missing rows is in the queue."""
        wanted = self._id_for(missing)
        before = self.entry.queued
        known = queue.status(before) if before else None
        if known is not None and known.state is not BatchState.UPLOADING:
            return
        if known is not None and before != wanted:
            queue.forget(before)  # an upload begun for other rows, from files since changed
        self._save(queued=wanted, state="running")
        self.watch.on_phase("queueing", 0.0)
        submit(
            queue,
            missing,
            self.options.model,
            batch_id=wanted,
            name=self.options.name,
            progress=self._sent,
        )

    def _id_for(self, missing: Sequence[JobSpec]) -> str:
        """The batch's own id for all rows; for some of them one that says which."""
        if len(missing) == len(self.rows):
            return self.entry.batch
        digest = hashlib.sha256(",".join(str(row.index) for row in missing).encode()).hexdigest()
        return batch_id_for(self.options.digest, self.options.model, self.entry.batch + digest)

    def _sent(self, done: int, total: int) -> None:
        self.watch.on_phase("queueing", done / total)
        if self.stop.is_set():
            raise KeyboardInterrupt

    def _clear(self, queue: Queue, server: EmbeddedServer | None) -> None:
        """The results are on disk: the queue may forget the batch, and nobody works on it."""
        self._dismiss(queue, server, self.entry.queued)
        self._save(queued="", elapsed_s=self.elapsed_s)

    def _dismiss(self, queue: Queue, server: EmbeddedServer | None, batch_id: str) -> None:
        """Remove a batch, if there is one, and what a worker that is gone left of it."""
        if batch_id:
            worker = self._worker(queue, server, batch_id)
            worker.stop()
            worker.forget()
            queue.forget(batch_id)

    def _follow(
        self, queue: Queue, server: EmbeddedServer | None, files: ResultFiles, missing: int
    ) -> None:
        """Write results until the missing rows are there, or the queue has no more to give."""
        batch_id = self.entry.queued
        worker = self._worker(queue, server, batch_id)
        report = Reporter(self.watch, files, len(self.rows), lambda: self.elapsed_s)
        try:
            follower = Follower(
                queue, server, batch_id, files, worker, report, self.stop, self._remember
            )
            follower.run(len(files.written) + missing)
        finally:
            self._done = len(files.written)
            self._save(elapsed_s=self.elapsed_s)

    def _worker(self, queue: Queue, server: EmbeddedServer | None, batch_id: str) -> PrivateWorker:
        options = self.options
        settings = WorkerSettings(
            redis_url=server.url if server else given_url(options.redis) or "",
            model=options.model,
            max_batch=options.max_batch,
            lease_ttl_s=options.lease_ttl_s,
            max_context=options.max_context,
            spec=options.spec,
            cost_dir=str(cost_dir(options.home)),
            only_when=ALWAYS,
            pending_dir=str(pending_dir(options.home)),
            cache_dir=options.cache_dir,
            cache_bytes=options.cache_bytes,
            memory=options.memory,
            diagnostics=options.diagnostics,
            engine_command=options.engine_command,
        )
        return PrivateWorker(
            queue=queue,
            folder=self._folder,
            batch_id=batch_id,
            settings=settings,
            # The worker counts as a user of the server too: nobody stops it under a worker.
            inherit=(server.users_fd,) if server else (),
        )
