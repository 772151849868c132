"""What tests of `run` share: options, a watcher that remembers, and a client in its own process.

Run as `python client_tools.py JSON` it is that client: it runs a batch and prints its totals.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from queue_tools import FAKE_ENGINE, MODEL, row

from dflash_batch.worker import submit as submit_module
from dflash_batch.worker.appender import Appender
from dflash_batch.worker.client import Interrupted, RunOptions, run_batch
from dflash_batch.worker.contract import JobSpec
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.progress import Progress
from dflash_batch.worker.queue import Queue


@dataclass
class Remember:
    """A watcher that keeps all it is told, and does `action` once when `at` rows are written."""

    at: int = 0
    action: Callable[[], object] | None = None
    phases: list[tuple[str, float | None]] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def on_phase(self, text: str, share: float | None) -> None:
        self.phases.append((text, share))

    def on_progress(self, progress: Progress) -> None:
        self.progress.append(progress)
        if self.action is not None and progress.done >= self.at:
            action, self.action = self.action, None
            action()

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def rows_of(count: int) -> list[JobSpec]:
    return [row(index) for index in range(count)]


def verbose_rows(count: int) -> list[JobSpec]:
    """Rows whose answers are long: about 4 kB."""
    rows = [row(index, f"verbose {index}") for index in range(count)]
    return [spec.model_copy(update={"max_tokens": 3900}) for spec in rows]


def options(folder: Path, *engine: str, **changes: Any) -> RunOptions:
    """Options of a run whose files and home lie in `folder`."""
    chosen: dict[str, Any] = {
        "digest": "d" * 64,
        "name": "in.jsonl",
        "model": MODEL,
        "output": folder / "in.out.jsonl",
        "errors": folder / "in.errors.jsonl",
        "home": folder / "home",
        "max_batch": 8,
        "engine_command": (*FAKE_ENGINE, *engine),
    }
    if "home" in changes:
        changes["home"] = Path(changes["home"])
    return RunOptions(**(chosen | changes))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file, each of them whole."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def worker_pid(home: Path) -> int:
    """Process id of the private worker of the one run that goes on in `home`."""
    [note] = (home / "runs").glob("*.worker")
    return int(json.loads(note.read_text())["pid"])


def engine_pid(home: Path) -> int:
    """Process id of the engine that this worker started last."""
    [log] = (home / "runs").glob("*.log")
    line = [line for line in log.read_text().splitlines() if "engine_started" in line][-1]
    return int(line.split("pid=")[1].split()[0])


def die_at(point: str, times: int) -> None:
    """Have this process killed (SIGKILL) the `times`-th time it comes to a point.

    "add": shards are sent; "write": half of a line is in the file; "sync": lines are written and
    not on disk; "acknowledge": they are on disk and the queue does not know.
    """
    place: Any = {"add": Queue, "acknowledge": Queue, "write": Appender, "sync": Appender}[point]
    name = {"write": "append", "add": "upload"}.get(point, point)
    whole = getattr(place, name)
    left = times
    submit_module.CHUNK = 1  # a shard in each call

    def die(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left > 0:
            return whole(self, *args, **more)
        if point == "write":
            os.write(self.open(), args[0].encode()[: len(args[0]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, name, die)


def main(arguments: Sequence[str]) -> int:
    given = json.loads(arguments[0])
    print("started", flush=True)
    if given.get("die"):
        die_at(given["die"], given.get("times", 1))
    if given.get("file_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (given["file_bytes"], given["file_bytes"]))
    chosen = options(Path(given["folder"]), *given["engine"], **given.get("options", {}))
    try:
        make = verbose_rows if given.get("verbose") else rows_of
        rows = make(given["rows"])
        for index in given.get("poison", ()):
            rows[index] = row(index, f"poison {index}")
        totals = run_batch(rows, [], chosen, Remember())
    except Interrupted:
        return 130
    except UserError as error:
        print(error)
        return 9
    print(json.dumps(totals.as_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
