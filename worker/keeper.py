"""The keeper of the engine: starts it, hears it, sees it die or stand still, starts it again."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from dflash_batch.worker.contract import ErrorCode, JobSpec, Lease, ModelRef
from dflash_batch.worker.guard import Guard
from dflash_batch.worker.log import say, warn
from dflash_batch.worker.pipe import (
    Admit,
    AskBack,
    Beat,
    Command,
    Drop,
    Failed,
    Hold,
    Load,
    Narrow,
    Ready,
    Report,
    RowDone,
    Stop,
    SupervisorEnd,
)
from dflash_batch.worker.settings import WorkerSettings
from dflash_batch.worker.width import Width

FAILURES_TO_PARK = 5
PARKED_S = 300.0
_STOP_S = 5.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Died:
    """The engine is gone without having been asked to."""

    reason: str
    code: str
    loading: bool  # before it was ready: no row is to blame
    hopeless: bool  # the model cannot be loaded, or has failed too often: trying again is no use
    too_wide: bool = False  # out of memory with several rows at once: none of them is to blame


class Keeper:
    """Keeps one engine running with the model that is wanted."""

    def __init__(self, settings: WorkerSettings, worker: str) -> None:
        self._settings = settings
        self._worker = worker
        self._engine: _Engine | None = None
        self._failures = 0
        self._start_at = 0.0
        self._holding = False
        self._width = Width(settings.max_batch)
        self._guard = Guard(settings.memory_limit)
        self.spent = False  # it takes too much memory: to be replaced as soon as it has no rows
        self.model: ModelRef | None = None
        self.ready: Ready | None = None
        self.load = Beat(steps=0, waiting=0, active=0, tokens=0)

    @property
    def parked(self) -> bool:
        """Whether the last start was given up and the next one is far off."""
        return self._engine is None and self._start_at - time.monotonic() > PARKED_S / 2

    def want(self, model: ModelRef | None) -> None:
        """Change the model; the engine of another one is stopped. Nothing may run in it."""
        if model != self.model:
            self.stop()
            self.model = model
            self._width = Width(self._settings.max_batch)
            self._failures = 0
            self._start_at = 0.0

    def admit(self, lease: Lease, rows: Sequence[JobSpec]) -> None:
        self._send(
            Admit(shard_id=lease.shard.id, epoch=lease.epoch, rows=list(rows), tried=lease.tried)
        )

    def drop(self, shard_id: str) -> None:
        self._send(Drop(shard_id=shard_id))

    def ask_back(self) -> None:
        """Ask for half of what the engine has not started; `Returned` tells which rows."""
        self._send(AskBack())

    def hold(self, on: bool) -> None:
        """Have the engine stand still with its rows, or go on."""
        if on != self._holding and self._engine is not None:
            self._holding = on
            say("decoding_paused" if on else "decoding_resumed")
            self._send(Hold(on=on))

    def listen(self, timeout_s: float, *, busy: bool) -> list[Report | Died]:
        """What the engine has said since; waits for it up to `timeout_s`.

        Starts the engine when one is wanted and due. `busy`: it has rows, and so is expected to
        make progress. After Died nothing runs any more.
        """
        self._start_if_due()
        if self._engine is None:
            time.sleep(timeout_s)
            return []
        engine = self._engine
        reports: list[Report | Died] = []
        for report in engine.listen(timeout_s):
            match report:
                case Ready():
                    self.ready = report
                case Beat():
                    self.load = report
                    self._guard_memory(engine)
                case RowDone():
                    self._failures = 0
                case _:
                    pass
            reports.append(report)
        if self._holding or not busy:
            engine.rest()
        if self.spent and not busy:
            say("engine_recycled", pid=engine.pid)
            self.stop()
        elif engine.over or self._stands_still(engine):
            reports.append(self._bury(engine))
        return reports

    def stop(self, *, at_once: bool = False) -> None:
        """End the engine, if there is one. `at_once`: in the middle of what it does."""
        if self._engine is not None:
            if at_once:
                self._engine.kill()
            self._engine.stop()
            self._forget_engine()

    def _guard_memory(self, engine: _Engine) -> None:
        """An engine that takes too much gets no more rows, and ends with those it has."""
        if self._guard.look(engine.pid) and not self.spent and self.ready is not None:
            self.spent = True
            self._width.trouble()
            warn("memory_over_limit", bytes=self._guard.highest, limit=self._guard.limit)
            self._send(Narrow(rows=self._width.rows))

    def _start_if_due(self) -> None:
        if self.model is not None and self._engine is None and time.monotonic() >= self._start_at:
            self._engine = _Engine(self._settings.engine_command)
            self._width.start()
            say(
                "engine_started",
                pid=self._engine.pid,
                model=self.model.target,
                width=self._width.rows,
            )
            self._send(
                Load(
                    model=self.model,
                    worker=self._worker,
                    max_batch=self._width.rows,
                    max_context=self._settings.max_context,
                    spec=self._settings.spec,
                    cost_dir=self._settings.cost_dir,
                    cache_dir=self._settings.cache_dir,
                    cache_bytes=self._settings.cache_bytes,
                    memory=self._settings.memory,
                    diagnostics=self._settings.diagnostics,
                )
            )

    def _stands_still(self, engine: _Engine) -> bool:
        if self.ready is None or engine.still_s <= self._settings.stall_timeout_s:
            return False
        warn("engine_stalled", pid=engine.pid, seconds=engine.still_s)
        engine.kill()
        return True

    def _bury(self, engine: _Engine) -> Died:
        """Take leave of an engine and decide when to start the next one."""
        loading = self.ready is None
        reason, killed = engine.bury()
        failed = engine.failed
        code = failed.code if failed else ErrorCode.INTERNAL_ERROR.value
        if failed is not None:
            reason = failed.message
        elif killed and self._guard.was_short:  # by the system, for want of memory
            code = ErrorCode.OUT_OF_MEMORY.value
        no_memory = code == ErrorCode.OUT_OF_MEMORY.value
        too_wide = no_memory and not self._width.least
        if no_memory:
            self._width.trouble()
        else:
            self._width.peace()
        self._failures += 1
        hopeless = loading and (failed is not None or self._failures >= FAILURES_TO_PARK)
        wait_s = PARKED_S if hopeless else min(2.0 ** (self._failures - 2), PARKED_S)
        self._start_at = time.monotonic() + (
            0.0 if self._failures == 1 and not hopeless else wait_s
        )
        self._forget_engine()
        warn("engine_died", reason=reason, loading=loading, failures=self._failures)
        return Died(reason, code, loading=loading, hopeless=hopeless, too_wide=too_wide)

    def _forget_engine(self) -> None:
        self._engine = None
        self._holding = self.spent = False
        self._guard.forget()
        self.ready = None
        self.load = Beat(steps=0, waiting=0, active=0, tokens=0)

    def _send(self, command: Command) -> None:
        if self._engine is not None:
            self._engine.send(command)


class _Engine:
    """One engine process and what it says."""

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # its own group: Ctrl-C in a terminal is for the supervisor alone
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._pipe = SupervisorEnd(ours)
        assert self._process.stdout is not None
        self._talk = self._process.stdout
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.failed: Failed | None = None  # its own word on why it ends
        self._steps = -1
        self._moved = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def over(self) -> bool:
        return self._pipe.closed

    @property
    def still_s(self) -> float:
        """Seconds since it was last seen to make progress, or to have nothing to do."""
        return time.monotonic() - self._moved

    def rest(self) -> None:
        """It has nothing to do, so standing still is no fault."""
        self._moved = time.monotonic()

    def send(self, command: Command) -> None:
        self._pipe.send(command)

    def listen(self, timeout_s: float) -> list[Report]:
        writable = [self._pipe] if self._pipe.has_unsent else []
        listening: list[SupervisorEnd | IO[bytes]] = [self._pipe]
        if not self._talk.closed:
            listening.append(self._talk)
        readable, _, _ = select.select(listening, writable, [], timeout_s)
        if self._talk in readable:
            self._relay()
        self._pipe.flush()
        reports = self._pipe.receive() if self._pipe in readable else []
        for report in reports:
            self._watch(report)
        return reports

    def stop(self) -> None:
        self._pipe.send(Stop())
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.bury()

    def kill(self) -> None:
        self._process.kill()

    def bury(self) -> tuple[str, bool]:
        """Wait for the end of the process; how it came, for people, and whether by SIGKILL."""
        self._pipe.close()
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._relay()
        self._talk.close()
        how = f"exit status {status}" if status >= 0 else f"killed by {_signal_name(-status)}"
        words = f"{how}: {self._tail[-1]}" if self._tail else how
        return words, status == -signal.SIGKILL

    def _watch(self, report: Report) -> None:
        match report:
            case Beat(steps=steps):
                if steps != self._steps:
                    self._moved = time.monotonic()
                self._steps = steps
            case Failed():
                self.failed = report
            case _:
                self._moved = time.monotonic()

    def _relay(self) -> None:
        """Pass on what the engine printed, and keep its last lines for error messages."""
        while not self._talk.closed and select.select([self._talk], [], [], 0)[0]:
            data = self._talk.read1(1 << 16)  # type: ignore[attr-defined]  # a BufferedReader
            if not data:
                self._talk.close()
                return
            text = data.decode(errors="replace")
            sys.stderr.write(text)
            sys.stderr.flush()
            self._tail.extend(line for line in text.splitlines() if line.strip())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
