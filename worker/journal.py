"""What a home remembers of each output file: which run fills it, and how far that came.

Only what the files and the queue cannot tell is kept here; both would survive its loss, save for
the time spent so far and for a batch that was started over with --new.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import diskcache

from dflash_batch.worker.contract import Record
from dflash_batch.worker.home import HomeError, private_dir


class Run(Record):
    """A `run` of one input with one model into one output file."""

    batch: str  # as the lines name it
    digest: str  # of the input
    model_key: str
    queued: str = ""  # the batch the queue works on: `batch`, or one of its rows that got lost
    replaced: str = ""  # a batch of an earlier run that the queue is to forget
    state: Literal["replacing", "running", "done"] = "running"
    elapsed_s: float = 0.0  # over all sessions
    name: str = ""  # of the input, for people


class Journal:
    """Runs by output file, on disk when `save` returns."""

    def __init__(self, store: diskcache.Cache) -> None:
        self._store = store

    def find(self, output: Path) -> Run | None:
        """The run that last wrote to `output`."""
        data = self._store.get(_key(output))
        return None if data is None else Run.model_validate(data)

    def save(self, output: Path, run: Run) -> None:
        self._store.set(_key(output), run.model_dump())


@contextmanager
def open_journal(home: Path) -> Iterator[Journal]:
    """The journal of `home`; several processes may have it open at once. Raises HomeError."""
    folder = private_dir(home / "journal")
    try:
        store = diskcache.Cache(
            str(folder),
            disk=diskcache.JSONDisk,
            eviction_policy="none",
            sqlite_synchronous=2,  # FULL: saved means on disk
        )
        try:
            yield Journal(store)
        finally:
            store.close()
    except sqlite3.DatabaseError as error:
        raise HomeError(
            f"the journal in {folder} cannot be used: {error}. Unless the disk is full, remove "
            "that folder; it holds nothing that a run cannot do without."
        ) from error


def _key(output: Path) -> str:
    return str(output.absolute())
