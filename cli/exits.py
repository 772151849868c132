"""Exit codes, and which trouble ends in which."""

from __future__ import annotations

OK = 0  # done, all requests answered
SOME_FAILED = 1  # done, some requests failed
USAGE = 2  # the command, or a place it names, has to be changed
INVALID_INPUT = 3  # nothing was queued
NOT_FOUND = 4  # no such batch, file or model
QUEUE_UNREACHABLE = 5
NO_WORKER = 6  # no worker can run it
TIMEOUT = 7
CANCELLED = 8
INTERNAL = 70  # a fault of ours (EX_SOFTWARE)
INTERRUPTED = 130  # Ctrl-C; the batch goes on when the command is run again

_BY_CODE = {
    "invalid_input": INVALID_INPUT,
    "file_not_found": NOT_FOUND,
    "model_not_found": NOT_FOUND,
    "batch_not_found": NOT_FOUND,
    "worker_not_found": NOT_FOUND,
    "cache_not_found": NOT_FOUND,
    "queue_unreachable": QUEUE_UNREACHABLE,
    "queue_unfit": QUEUE_UNREACHABLE,
    "queue_refused": QUEUE_UNREACHABLE,
    "batch_lost": QUEUE_UNREACHABLE,
    "worker_failed": NO_WORKER,
}


def exit_code(code: str) -> int:
    """The exit code for the `code` of a UserError."""
    return _BY_CODE.get(code, USAGE)
