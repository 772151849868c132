"""Ctrl-C and its kin, seen at points where it is safe to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, SIGTERM or SIGHUP sets; a second one interrupts at once.

    So a write is never cut in two between the file and our memory of it. Signals can only be
    caught in the main thread; elsewhere they are left alone.
    """
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # What is ignored stays so: nohup ignores SIGHUP, shells SIGINT of background jobs.
    heard = [number for number in _STOPS if signal.getsignal(number) not in (None, signal.SIG_IGN)]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
