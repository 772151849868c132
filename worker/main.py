"""Where a worker is put together: settings in, exit status out."""

from __future__ import annotations

import argparse
import os
import sys
import time

from dflash_batch.worker.citizen import citizen
from dflash_batch.worker.log import set_up, warn
from dflash_batch.worker.queue import Queue, QueueUnreachable, connect
from dflash_batch.worker.service import EXIT_MODEL, EXIT_OK, Supervisor
from dflash_batch.worker.settings import WorkerSettings

__all__ = [
    "EXIT_MODEL",
    "EXIT_OK",
    "EXIT_UNREACHABLE",
    "WorkerSettings",
    "main",
    "run_worker",
]

EXIT_UNREACHABLE = 5

URL_VARIABLE = "DFLASH_BATCH_REDIS"
_PATIENCE_S = 10.0


def run_worker(settings: WorkerSettings) -> int:
    """Work until drained, stopped or done; blocks. Call it in the main thread.

    Returns 0 (done or drained), 4 (the model cannot be loaded), 5 (no queue at the start).
    """
    set_up(settings.log_level)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            # two pools: RQ sets timeouts of its own on the one it is given. Calls are not tried
            # again inside the client: the service loop does that, and beats first
            main, view = (
                connect(settings.redis_url, retries=1, timeout_s=settings.call_timeout_s)
                for _ in range(2)
            )
            supervisor = Supervisor(settings, Queue(main), view, citizen(settings.only_when))
            break
        except QueueUnreachable as error:
            if time.monotonic() > deadline:
                warn("queue_unreachable", reason=error)
                return EXIT_UNREACHABLE
            time.sleep(0.5)
    status = supervisor.run()
    if status == EXIT_MODEL:
        print(supervisor.note, file=sys.stderr)  # last, so that whoever started us finds it
    return status


def main() -> int:
    """`python -m dflash_batch.worker.main --settings JSON`, for a worker in its own process.

    The address of the queue may hold a password: it is taken from DFLASH_BATCH_REDIS if that is
    set, so that it need not be on the command line.
    """
    parser = argparse.ArgumentParser(description="Run one dflash-batch worker.")
    parser.add_argument("--settings", required=True, help="WorkerSettings as JSON")
    options = parser.parse_args()
    try:
        settings = WorkerSettings.from_json(
            options.settings, redis_url=os.environ.get(URL_VARIABLE)
        )
    except ValueError as error:
        parser.error(str(error))
    return run_worker(settings)


if __name__ == "__main__":
    sys.exit(main())
