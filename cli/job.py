"""A job of the decoder's room in a process of its own: an order in, JSON lines out.

Ctrl-C is passed on.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dflash_batch.cli.common import talk
from dflash_batch.worker.errors import UserError


class JobFailed(UserError):
    """Raised when the process cannot do what it was asked, or dies."""

    def __init__(self, message: str, code: str = "worker_failed") -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the process's own word


def drive(
    module: str, order: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run `python -m module` on `order`; its last word, `{"result"}` or `{"stopped"}`.

    `show` gets every other line. The first Ctrl-C asks the process to end well, the second one
    ends it. It ends by itself when we do. Raises JobFailed.
    """
    process = subprocess.Popen(
        (sys.executable, "-m", module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C comes to us alone
    )
    assert process.stdin is not None
    assert process.stdout is not None
    last: dict[str, Any] | None = None
    asked = False
    try:
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()  # and left open: its end would be ours
        while True:
            try:
                line = process.stdout.readline()
                if not line:
                    break
                match json.loads(line) if line.startswith("{") else None:
                    case {"error": message, "code": code}:
                        raise JobFailed(message, code)
                    case {"result": _} | {"stopped": _} as last:
                        pass
                    case None:
                        talk(line.rstrip())
                    case word:
                        show(word)
            except KeyboardInterrupt:
                if asked:
                    raise
                asked = True
                talk("stopping; Ctrl-C once more does not wait for it")
                process.send_signal(signal.SIGINT)
        status = process.wait()
    except BrokenPipeError as error:
        raise JobFailed(f"the process ended at once with status {process.wait()}") from error
    finally:
        process.kill()  # of no effect on one that has ended
        process.wait()
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()
    if last is None:
        raise JobFailed(f"the process ended with status {status} and no result")
    return last
