"""Sleep of the machine: held off while rows run, and noticed when it came all the same.

Nothing rests on holding it off: a lid may be closed. Who wakes beats before committing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from dflash_batch.worker.log import warn

_STOP_S = 2.0


def continuous() -> float:
    """Seconds on a clock that is never set and goes on while the machine sleeps.

    `time.monotonic` stands still then, on macOS and on Linux.
    """
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)  # mach_continuous_time
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SleepWatch:
    """Tells how long the machine slept, by two clocks of which one stands still in sleep."""

    SHORTEST_S = 1.0

    def __init__(
        self,
        awake: Callable[[], float] = time.monotonic,
        always: Callable[[], float] = continuous,
    ) -> None:
        self._awake, self._always = awake, always
        self._apart = always() - awake()

    def slept_s(self) -> float:
        """Seconds of sleep since the last call; 0 when there was none worth the name."""
        apart = self._always() - self._awake()
        slept, self._apart = apart - self._apart, apart
        return slept if slept >= self.SHORTEST_S else 0.0


def caffeinate() -> tuple[str, ...] | None:
    """The command that holds idle sleep off for as long as it and we live; None where none is.

    The display may sleep: keeping it on while the GPU works has made Macs panic.
    """
    if sys.platform == "darwin":
        return ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid()))
    return None


class StayAwake:
    """Holds idle sleep off with a process, while that is wanted."""

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        return self._process is not None

    def hold(self, wanted: bool) -> None:
        """Begin to hold it off, go on, or let it come. Where that fails it is said, once."""
        if self._process is not None and self._process.poll() is not None:
            self._give_up(f"exit status {self._process.returncode}")
        if wanted and self._process is None and self._command is not None:
            self._start(self._command)
        elif not wanted and self._process is not None:
            self._stop(self._process)

    def _start(self, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for us; the rows in hand are still to be finished
            )
        except OSError as error:
            self._give_up(str(error))

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def _give_up(self, reason: str) -> None:
        warn("sleep_not_held_off", reason=reason)
        self._process = self._command = None
