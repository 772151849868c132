"""A job in a process of its own: an order on stdin, JSON lines on stdout, an end when asked.

The order is the first line of stdin. Stdin then stays open as long as somebody wants the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from dflash_batch.decoder.errors import DecoderError

Say = Callable[[dict[str, Any]], None]
Wanted = Callable[[], bool]
T = TypeVar("T")


def serve(order: Callable[..., T], job: Callable[[T, Say, Wanted], dict[str, Any]]) -> int:
    """Run `job` on the order read from stdin; the process's exit status."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    line = sys.stdin.readline()
    threading.Thread(target=_watch, args=(over,), daemon=True).start()
    try:
        _say(job(order(**json.loads(line)), _say, lambda: not over.is_set()))
    except DecoderError as error:
        _say({"error": str(error), "code": error.code})
        return 1
    return 0


def _watch(over: threading.Event) -> None:
    """Nothing more comes on stdin; its end is that of whoever asked."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    over.set()


def _say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)
