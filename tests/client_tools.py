"""What tests of `run` share: options, a watcher that remembers, and a client in its own process.

Run as `python client_tools.py JSON` it is that client: it runs a batch and prints its totals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from queue_tools import FAKE_ENGINE, MODEL, row

from dflash_batch.worker.client import Interrupted, RunOptions, run_batch
from dflash_batch.worker.contract import JobSpec
from dflash_batch.worker.progress import Progress


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


def main(arguments: Sequence[str]) -> int:
    given = json.loads(arguments[0])
    print("started", flush=True)
    chosen = options(Path(given["folder"]), *given["engine"])
    try:
        totals = run_batch(rows_of(given["rows"]), [], chosen, Remember())
    except Interrupted:
        return 130
    print(json.dumps(totals.as_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
